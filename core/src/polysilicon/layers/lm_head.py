"""The last layer: logits over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.layers.base import Layer, check_matrix, check_vector, dtype_name
from polysilicon.ops import lm_head
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


class LMHead(Layer):
    """Scaled, optionally soft-capped logits (Gemma 2, arXiv:2408.00118).

    Args:
        weight: [vocabulary, hidden]; often the embedding's own Parameter.
        bias: [vocabulary], or None.
        scale: factor of the logits, before the cap.
        softcap: logits become softcap · tanh(logits / softcap); 0 for none.

    Raises:
        TypeError, ValueError: weight or bias of the wrong kind or shape, a negative cap.
    """

    lm_head: Callable[..., Any]
    weight: nn.Parameter | Tensor
    bias: nn.Parameter | Tensor | None

    def __init__(
        self,
        weight: nn.Parameter | Tensor,
        bias: nn.Parameter | Tensor | None = None,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        check_matrix("LMHead", "weight", weight)
        check_vector("LMHead", "bias", bias, weight.shape[0])
        if not softcap >= 0:
            raise ValueError(f"LMHead: softcap is {softcap}, expected a number >= 0 (0: none)")
        self.weight = weight
        self.bias = bias
        self.scale = float(scale)
        self.softcap = float(softcap)
        self.bind_kernel("lm_head", lm_head.torch_kernel)

    @property
    def in_features(self) -> int:
        """Size of the hidden states (nn.Linear's name for it, which model code reads)."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """Size of the vocabulary."""
        return int(self.weight.shape[0])

    def problems(self) -> dict[str, Problem]:
        facts = {
            "vocabulary": self.out_features,
            "hidden": self.in_features,
            "bias": self.bias is not None,
            "scale": self.scale,
            "softcap": self.softcap,
        }
        return {"lm_head": Problem(op="lm_head", dtype=dtype_name(self.weight.dtype), facts=facts)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., vocabulary] in the dtype of x."""
        logits: Tensor = self.lm_head(x, self.weight, self.bias, self.scale, self.softcap)
        return logits

    def extra_repr(self) -> str:
        return (
            f"{self.in_features} → {self.out_features}, scale={self.scale:g}, cap={self.softcap:g}"
        )
