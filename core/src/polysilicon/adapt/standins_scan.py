"""Stand-ins for the scans of Mamba-2, whose states have heads, and of Mamba-1, whose have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn import functional as F

from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.standin import StandIn, refuse_packed
from polysilicon.layers.selective_scan import SelectiveScan
from polysilicon.layers.state_space import StateSpace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from polysilicon.layers.attention import PagedContext


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
        refuse_packed(kwargs)
        y, state = self.layer(hidden_states, dt, A, B, C, D, dt_bias, initial_states)
        return (y.float(), state) if return_final_states else y.float()


class ScanStep(StandIn):
    """One token of Mamba-2 for each sequence: [b, h, p] after `state` [b, h, p, n], which moves on.

    Decays, steps and biases come expanded to a number for each place of a head; z is a gate.
    The function for Mamba-1 has the same arguments, without heads.
    """

    takes = (*("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"),)
    paged = False

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> StandIn:
        if given["hidden_states"].dim() == 2:
            return SelectiveStep(_selective_scan(given, dtype, name, context))
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
        refuse_packed(kwargs)
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


class SelectivePrompt(StandIn):
    """Mamba-1's recurrence over [b, C, L], gated by z."""

    takes = (
        *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus"),
        *("return_last_state", "use_mambapy", "use_associative_scan"),
    )
    paged = True
    token_dim = 2

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> Self:
        return cls(_selective_scan(given, dtype, name, context))

    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        refuse_packed(kwargs)
        tokens = (value.transpose(1, 2) for value in (hidden_states, dt, B, C))
        x, steps, keys, queries = tokens
        y, state = self.layer(x, steps, A, keys, queries, D, delta_bias)
        # Transformers' sum with the skipped input has the dtype of D, which is float32.
        out = y.transpose(1, 2).to(y.dtype if D is None else torch.promote_types(y.dtype, D.dtype))
        out = out if z is None else out * F.silu(z)
        return (out, state) if return_last_state else out


class SelectiveStep(StandIn):
    """One token of Mamba-1 for each sequence: [b, C] after `state` [b, C, n], which moves on."""

    takes = ScanStep.takes
    paged = False

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
        refuse_packed(kwargs)
        x, steps, keys, queries = (value[:, None] for value in (hidden_states, dt, B, C))
        y, after = self.layer(x, steps, A, keys, queries, D, dt_bias, state)
        state.copy_(after)
        out: Tensor = y[:, 0]
        return out if z is None else (out * F.silu(z)).to(out.dtype)


def _selective_scan(
    given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
) -> SelectiveScan:
    softplus = given["delta_softplus"] if "delta_softplus" in given else given["dt_softplus"]
    channels, states = given["A"].shape
    return SelectiveScan(
        channels, states, softplus=bool(softplus), dtype=dtype, name=name, context=context
    )
