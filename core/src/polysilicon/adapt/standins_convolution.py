"""Stand-ins for the functions that convolve over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.standin import StandIn, refuse_packed
from polysilicon.layers.causal_conv1d import CausalConv1d

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from polysilicon.layers.attention import PagedContext


class ConvolvePrompt(StandIn):
    """[b, C, L] from zeros on, or from the engine's states."""

    takes = ("hidden_states", "weight", "bias", "activation")
    paged = True
    token_dim = 2

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        return cls(_convolution(given, dtype, name, context))

    def forward(
        self,
        hidden_states: Tensor,  # [b, C, L]
        weight: Tensor,  # [C, W]
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:  # [b, C, L]
        refuse_packed(kwargs)
        y, _ = self.layer(hidden_states.transpose(1, 2), weight, bias)
        out: Tensor = y.transpose(1, 2)
        return out


class ConvolveStep(StandIn):
    """[b, C, L] after the inputs in `conv_state`, [b, C, W or W - 1], which moves on."""

    takes = ("hidden_states", "conv_state", "weight", "bias", "activation")
    paged = False

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        return cls(_convolution(given, dtype, name, context))

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        past = conv_state[..., conv_state.shape[-1] - weight.shape[-1] + 1 :]
        y, _ = self.layer(hidden_states.transpose(1, 2), weight, bias, past)
        inputs = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=-1)
        conv_state.copy_(inputs[..., -conv_state.shape[-1] :])
        out: Tensor = y.transpose(1, 2)
        return out


def _convolution(
    given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
) -> CausalConv1d:
    channels, taps = given["weight"].shape
    try:
        return CausalConv1d(
            channels,
            taps,
            activation=given["activation"] or "identity",
            bias=given["bias"] is not None,
            dtype=dtype,
            name=name,
            context=context,
        )
    except ValueError as refusal:
        raise Unverified(str(refusal)) from refusal
