"""Measured memory bandwidth: what decode, which reads every weight once a token, is bounded by."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: Far above any cache, so that every pass comes from memory.
_BYTES = 512 << 20
_PASSES = 8


def read_gb_s(size: int = _BYTES, passes: int = _PASSES) -> float:
    """GB/s (10⁹ bytes) at which all of PyTorch's threads together read memory; the best pass.

    Two readers are tried, as compilers vectorise them differently: a sum, and the product of a
    matrix with two columns, which is what a decode step does.
    """
    data = torch.ones(size // 4)
    # Columns that lie one after the other: the form that the matrix product reads fastest.
    matrix, columns = data.view(-1, 1024), torch.ones(2, 1024).t()
    readers: tuple[Callable[[], Any], ...] = (data.sum, lambda: torch.mm(matrix, columns))
    best = float("inf")
    with torch.inference_mode():
        for reader in readers * passes:
            began = time.perf_counter()
            reader()
            best = min(best, time.perf_counter() - began)
    return data.numel() * 4 / best / 1e9


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters; tied ones and views of one storage count once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())
