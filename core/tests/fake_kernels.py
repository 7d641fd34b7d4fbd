"""Kernels of silu_and_mul for the tests: right, wrong, slow, one that raises, a shape function."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from polysilicon.ops.silu_and_mul import torch_kernel

if TYPE_CHECKING:
    from torch import Tensor


def right(x: Tensor) -> Tensor:
    """The portable kernel by another name."""
    return torch_kernel(x)


def second(x: Tensor) -> Tensor:
    return right(x)


def fake(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def wrong(x: Tensor) -> Tensor:
    return right(x) * 1.01


def wrong_at_three(x: Tensor) -> Tensor:
    """The kind of bug that only one token count shows."""
    result = right(x)
    return result * 1.01 if x.numel() // x.shape[-1] == 3 else result


def slow(x: Tensor) -> Tensor:
    time.sleep(0.008)
    return right(x)


def slow_if_many(x: Tensor) -> Tensor:
    if x.numel() // x.shape[-1] > 16:
        time.sleep(0.008)
    return right(x)


def needs_64(x: Tensor) -> Tensor:
    assert x.shape[-1] % 128 == 0
    return right(x)


def needs_16_tokens_or_less(x: Tensor) -> Tensor:
    assert x.numel() // x.shape[-1] <= 16
    return right(x)


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("misaligned address")
