"""lm_head by oneDNN; see `kernels.onednn.linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.kernels.onednn import linear
from polysilicon.ops.lm_head import finish

if TYPE_CHECKING:
    from torch import Tensor


def lm_head(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocabulary, hidden]
    bias: Tensor | None,  # [vocabulary]
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Logits [..., vocabulary], scaled and soft-capped."""
    return finish(linear.linear(x, weight, bias), scale, softcap)


def skinny_lm_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """The same for a few tokens."""
    return finish(linear.skinny_linear(x, weight, bias), scale, softcap)
