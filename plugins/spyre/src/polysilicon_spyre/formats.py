"""Numbers on the card: what its formats lose, and tensors as bits, which nothing loses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from polysilicon.api import LayoutError
from polysilicon_spyre.chips import STORED

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def narrowed(x: Tensor) -> Tensor:
    """What comes back from a round trip through the card's format: float16 and whole numbers.

    float16 becomes DL16 (1-6-9): rounded to 9 mantissa bits, to nearest, ties to even. That the
    card rounds so is our assumption; its format is public, its rounding isn't. Nothing applies
    this by itself.

    Raises:
        LayoutError: bfloat16, whose loss depends on an exponent bias that isn't public.
    """
    import torch

    name = dtype_name(x)
    if name not in STORED or name == "bfloat16":
        raise LayoutError(f"what the card makes of {name} is not public: take float16")
    if name == "int64":
        return x.to(torch.int32).long()
    if name != "float16":
        return x.clone()
    bits = x.float().view(torch.int32)
    # float32 has 14 mantissa bits more than DL16: add half of the last kept one, and cut.
    rounded = (bits + 0x1FFF + ((bits >> 14) & 1)) & ~0x3FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x.float()).half()


def dtype_name(x: Tensor) -> str:
    """torch's own spelling, as in records: `float16`."""
    return str(x.dtype).removeprefix("torch.")


def as_bits(x: Tensor) -> Tensor:
    """The same memory as whole numbers of the same width, which no copy or fill rounds."""
    return x.view(_bits_dtype(x.dtype))


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def bits_of(fill: float, like: Tensor) -> int:
    """A fill value of `like`'s dtype, as the whole number that `as_bits` shows."""
    import torch

    if math.isnan(fill) and not like.is_floating_point():
        raise LayoutError(f"{dtype_name(like)} has no NaN to fill padding with: give a number")
    filler = torch.tensor(fill).to(like.dtype)
    return int(filler.view(_bits_dtype(like.dtype)).item())
