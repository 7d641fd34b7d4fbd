"""Stand-ins for the gated delta rule, with a decay a head or one a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.standin import StandIn, refuse_packed
from polysilicon.layers.gated_delta_rule import GatedDeltaRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from polysilicon.layers.attention import PagedContext


class CorrectPrompt(StandIn):
    """The gated delta rule over [b, L, heads, size]."""

    takes = (
        *("query", "key", "value", "g", "beta", "chunk_size", "initial_state"),
        *("output_final_state", "use_qk_l2norm_in_kernel"),
    )
    paged = True

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        return cls(_delta_rule(given, dtype, name, context))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_packed(kwargs)
        y, state = self.layer(query, key, value, g, beta, initial_state)
        return y, state if output_final_state else None


class CorrectStep(StandIn):
    """The same for the step of one token, which Transformers asks of another function."""

    takes = (
        *("query", "key", "value", "g", "beta", "initial_state"),
        *("output_final_state", "use_qk_l2norm_in_kernel"),
    )
    paged = False

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        return cls(_delta_rule(given, dtype, name, context))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_packed(kwargs)
        y, state = self.layer(query, key, value, g, beta, initial_state)
        return y, state if output_final_state else None


def _delta_rule(
    given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
) -> GatedDeltaRule:
    key_heads, size = given["key"].shape[2:]
    heads, v_size = given["value"].shape[2:]
    try:
        return GatedDeltaRule(
            key_heads,
            heads,
            size,
            v_size,
            scale=size**-0.5,
            normalize=bool(given["use_qk_l2norm_in_kernel"]),
            by_channel=given["g"].dim() == 4,
            dtype=dtype,
            name=name,
            context=context,
        )
    except ValueError as refusal:
        raise Unverified(str(refusal)) from refusal
