"""Kernels of silu_and_mul for the tests: right, wrong, slow, one that raises, and shape functions."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def right(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


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
    time.sleep(0.002)
    return right(x)


def slow_if_many(x: Tensor) -> Tensor:
    if x.numel() // x.shape[-1] > 16:
        time.sleep(0.002)
    return right(x)


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("misaligned address")
