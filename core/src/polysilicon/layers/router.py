"""The router of a mixture of experts: logits, then the chosen experts and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.layers.base import Layer, check_matrix, check_vector, dtype_name
from polysilicon.ops import linear, moe_router
from polysilicon.ops.moe_router import AFTER, SCORINGS
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


class Router(Layer):
    """Chooses `top_k` of E experts for every token (arXiv:1701.06538; groups: arXiv:2412.19437).

    Args:
        weight: [E, hidden].
        bias: [E] of the logits, or None.
        correction: [E] added to the scores for the choice only, or None.
        top_k: experts of a token.
        scoring: one of `ops.moe_router.SCORINGS`.
        groups: equal groups of experts, of which `top_groups` are open to a token; 1 for none.
        top_groups: see `groups`.
        group_top: a group's score is the sum of so many of its best scores.
        renormalize: whether the weights of a token sum to one, before `scale`.
        scale: factor of the weights.
        wide: whether the logits are computed in float32 from weights of a shorter dtype.
        names: parameter names of weight, bias and correction, which are those of the model.

    Raises:
        TypeError, ValueError: a tensor of the wrong kind or shape, or numbers that don't fit.
    """

    linear: Callable[..., Any]
    moe_router: Callable[..., Any]

    def __init__(
        self,
        weight: nn.Parameter | Tensor,
        bias: nn.Parameter | Tensor | None = None,
        correction: nn.Parameter | Tensor | None = None,
        *,
        top_k: int,
        scoring: str = "softmax",
        groups: int = 1,
        top_groups: int = 1,
        group_top: int = 1,
        renormalize: bool = False,
        scale: float = 1.0,
        wide: bool = False,
        names: tuple[str, str, str] = ("weight", "bias", "correction"),
    ) -> None:
        super().__init__()
        check_matrix("Router", "weight", weight)
        experts = weight.shape[0]
        check_vector("Router", "bias", bias, experts)
        check_vector("Router", "correction", correction, experts)
        if scoring not in SCORINGS:
            raise ValueError(f"Router: scoring is {scoring!r}, expected one of {SCORINGS}")
        if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
            raise ValueError(
                f"Router: {experts} experts in {groups} groups of which {top_groups} are open: "
                "expected equal groups, and from 1 to all of them open"
            )
        if not 1 <= group_top <= experts // groups:
            raise ValueError(f"Router: group_top is {group_top}, a group has {experts // groups}")
        if not 1 <= top_k <= experts // groups * top_groups:
            raise ValueError(
                f"Router: top_k is {top_k}, a token may choose from "
                f"{experts // groups * top_groups} experts"
            )
        self.names = names
        for name, tensor in zip(names, (weight, bias, correction), strict=True):
            if tensor is not None:
                self.register_tensor(name, tensor)
        self.top_k, self.scoring = top_k, scoring
        self.groups, self.top_groups, self.group_top = groups, top_groups, group_top
        self.renormalize, self.scale, self.wide = renormalize, float(scale), wide
        self.bind_kernel("linear", linear.torch_kernel)
        self.bind_kernel("moe_router", moe_router.torch_kernel)

    def _tensor(self, index: int) -> Tensor | None:
        tensor: Tensor | None = getattr(self, self.names[index], None)
        return tensor

    def problems(self) -> dict[str, Problem]:
        weight = getattr(self, self.names[0])
        (experts, hidden), dtype = weight.shape, dtype_name(weight.dtype)
        bias = self._tensor(1) is not None
        facts = {
            "experts": experts,
            "top_k": self.top_k,
            "scoring": self.scoring,
            "groups": self.groups,
            "renormalize": self.renormalize,
            "bias": self._tensor(2) is not None,
        }
        product = {"out": experts, "in": hidden, "bias": bias}
        return {
            "linear": Problem(op="linear", dtype="float32" if self.wide else dtype, facts=product),
            "moe_router": Problem(op="moe_router", dtype=dtype, facts=facts),
        }

    def forward(self, x: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[..., hidden] → logits [T, E], float32 weights [T, top_k], int64 experts [T, top_k].

        A `correction` [E] that the caller holds takes the place of the layer's own.
        """
        weight, bias, own = (self._tensor(i) for i in range(3))
        correction = own if correction is None else correction
        assert weight is not None
        x = x.reshape(-1, x.shape[-1])
        if self.wide:
            x, weight = x.float(), weight.float()
            bias = None if bias is None else bias.float()
        logits: Tensor = self.linear(x, weight, bias)
        weights, indices = self.moe_router(
            logits,
            correction,
            self.top_k,
            self.scoring,
            self.groups,
            self.top_groups,
            self.group_top,
            self.renormalize,
            self.scale,
        )
        return logits, weights, indices

    def scores(self, logits: Tensor) -> Tensor:
        """The scores of all experts, as some models return them for the logits."""
        return moe_router.scores(logits.float(), AFTER.get(self.scoring, self.scoring))

    def extra_repr(self) -> str:
        return f"{self.top_k} of {getattr(self, self.names[0]).shape[0]}, {self.scoring}"
