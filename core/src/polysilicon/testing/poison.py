"""Fresh memory filled with NaN, so that what a kernel leaves unwritten shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: What allocates without writing, as Python code calls it; a kernel's launcher is Python.
_ALLOCATORS = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_permuted,
        torch.empty_strided,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    }
)


class Poisoned(TorchFunctionMode):
    """While active, memory that Python code allocates holds NaN, the largest integer, or True.

    Memory that compiled code allocates for itself is out of reach.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            _fill(result)
        return result


def _fill(fresh: Tensor) -> None:
    if fresh.dtype == torch.bool:
        fresh.fill_(True)
    elif fresh.is_floating_point() or fresh.is_complex():
        fresh.fill_(float("nan"))
    else:
        fresh.fill_(torch.iinfo(fresh.dtype).max)
