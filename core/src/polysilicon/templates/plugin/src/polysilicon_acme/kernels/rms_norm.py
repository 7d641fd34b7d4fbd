"""rms_norm in plain PyTorch: replace the body by a call of your kernel language."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """x / rms(x) · (weight + offset); sums in float32, rounded once to the dtype of `x`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (weight.float() + offset)
    return normed.to(x.dtype)
