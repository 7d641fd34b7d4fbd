"""Seeded tensors in awkward memory forms, from which the ops' sample generators are built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


class Source:
    """Makes the same tensors each time it is built with the same seed.

    Numbers are drawn on the CPU, so that every device sees the same values.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, magnitude: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normal numbers of standard deviation `magnitude` in the source's dtype."""
        values = torch.randn(*shape, generator=self._generator, dtype=torch.float32)
        return (values * magnitude + mean).to(device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 numbers in [0, high)."""
        values = torch.randint(high, shape, generator=self._generator, dtype=torch.int64)
        return values.to(self.device)


def strided(x: Tensor) -> Tensor:
    """The same values, every second element of a larger storage (last stride 2)."""
    room = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    view = room[..., ::2]
    return view.copy_(x)


def shifted(x: Tensor) -> Tensor:
    """The same values, contiguous, but starting one element into the storage."""
    room = x.new_zeros(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The same values with the last two dims swapped in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def expanded(x: Tensor) -> Tensor:
    """The first row of `x` repeated over the first dim with stride 0."""
    return x[:1].expand(x.shape)


#: Name → form; applied to an activation of two dims or more.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "shifted": shifted,
    "transposed": transposed,
    "expanded": expanded,
}

#: Nothing, one, a prime, one below, at and above a tile of 16: where kernels go wrong.
TOKENS = (0, 1, 2, 7, 15, 16, 17)

#: Powers of ten that activations of real models span.
MAGNITUDES = (1e-4, 1e-2, 1.0, 1e2)
