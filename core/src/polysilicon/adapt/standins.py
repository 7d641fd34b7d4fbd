"""Layers that answer for the functions of Transformers' recurrent mixers.

A mixer keeps its own forward; the functions of its file that convolve, scan or correct become
these. Each is known by the names of its arguments and proved by running both.

In the engine a mixer has no cache, so it takes the forms for prompts, whose layers hold the
engine's states; outside, states are Transformers' cache, passed in and given back.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.nn import functional as F

from polysilicon.adapt.probe import Unverified
from polysilicon.errors import AdaptError
from polysilicon.layers.base import Layer
from polysilicon.layers.causal_conv1d import CausalConv1d
from polysilicon.layers.gated_delta_rule import GatedDeltaRule
from polysilicon.layers.state_space import StateSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from polysilicon.layers.attention import PagedContext
    from polysilicon.layers.recurrent import Recurrent
    from polysilicon.records import Problem

#: Arguments that say where packed sequences begin, which these functions of Transformers refuse.
_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class StandIn(Layer):
    """One function in Transformers' convention over a recurrent layer of ours.

    Args:
        layer: what computes.
    """

    #: Names of the function's arguments, in order.
    takes: ClassVar[tuple[str, ...]]
    #: Whether the engine runs this form: that for prompts, which needs no cache.
    paged: ClassVar[bool]
    #: Dim of the tokens in the arguments of a form for prompts.
    token_dim: ClassVar[int] = 1
    layer: Recurrent

    def __init__(self, layer: Recurrent) -> None:
        super().__init__()
        self.layer = layer

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        """The stand-in that the arguments of a call ask for.

        Raises:
            Unverified: they are of a kind that our layer does not take.
        """
        raise NotImplementedError  # each states its own

    def problems(self) -> dict[str, Problem]:
        """None of its own."""
        return {}


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
        _refuse_packed(kwargs)
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


class ScanPrompt(StandIn):
    """Mamba-2's recurrence over [b, L, h, p]; float32, as Transformers gives it."""

    takes = (
        *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"),
        *("initial_states", "dt_softplus", "dt_limit", "return_final_states"),
    )
    paged = True

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        heads, size = given["hidden_states"].shape[2:]
        groups, states = given["B"].shape[2:]
        low, high = given["dt_limit"]
        layer = StateSpace(
            heads,
            size,
            groups,
            states,
            softplus=bool(given["dt_softplus"]),
            limits=(float(low), float(high)),
            dtype=dtype,
            name=name,
            context=context,
        )
        return cls(layer)

    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        _refuse_packed(kwargs)
        y, state = self.layer(hidden_states, dt, A, B, C, D, dt_bias, initial_states)
        return (y.float(), state) if return_final_states else y.float()


class ScanStep(StandIn):
    """One token of Mamba-2 for each sequence: [b, h, p] after `state` [b, h, p, n], which moves on.

    Decays, steps and biases come expanded to a number for each place of a head; z is a gate.
    """

    takes = (*("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"),)
    paged = False

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        if given["hidden_states"].dim() != 3:
            raise Unverified("its scan has no heads, which our layer does not take yet")
        expanded = (given[key] for key in ("dt", "A", "D", "dt_bias") if given[key] is not None)
        if any(value.stride(-1) and value.shape[-1] > 1 for value in expanded):
            raise Unverified("its decays differ within a head")
        layer = StateSpace(
            *given["hidden_states"].shape[1:],
            *given["B"].shape[1:],
            softplus=bool(given["dt_softplus"]),
            dtype=dtype,
            name=name,
            context=context,
        )
        return cls(layer)

    def forward(
        self,
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        _refuse_packed(kwargs)
        y, after = self.layer(
            hidden_states[:, None],
            dt[:, None, :, 0],
            A[:, 0, 0],
            B[:, None],
            C[:, None],
            None if D is None else D[:, 0],
            None if dt_bias is None else dt_bias[:, 0],
            state,
        )
        state.copy_(after)
        out: Tensor = y[:, 0]
        return out if z is None else out * F.silu(z)


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
        _refuse_packed(kwargs)
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
        _refuse_packed(kwargs)
        y, state = self.layer(query, key, value, g, beta, initial_state)
        return y, state if output_final_state else None


STAND_INS: tuple[type[StandIn], ...] = (
    *(ConvolvePrompt, ConvolveStep, ScanPrompt, ScanStep, CorrectPrompt, CorrectStep),
)


def stand_in_for(function: Callable[..., Any]) -> type[StandIn] | None:
    """The kind of stand-in for a function of a model's file, by the names of its arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    return next((kind for kind in STAND_INS if kind.takes == names), None)


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


def _delta_rule(
    given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
) -> GatedDeltaRule:
    if given["g"].dim() != 3:
        raise Unverified("its state decays by channel, which our layer does not take yet")
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
            dtype=dtype,
            name=name,
            context=context,
        )
    except ValueError as refusal:
        raise Unverified(str(refusal)) from refusal


def _refuse_packed(kwargs: Mapping[str, Any]) -> None:
    for name in _PACKED:
        if kwargs.get(name) is not None:
            raise AdaptError(
                f"an adapted mixer was given {name!r}, by which several sequences share a row: "
                "give each sequence a row of its own, or call undo() first"
            )
