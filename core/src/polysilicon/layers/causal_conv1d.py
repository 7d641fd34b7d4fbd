"""A short causal convolution over time with the last inputs as its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.layers.base import dtype_name, portable
from polysilicon.layers.recurrent import Recurrent
from polysilicon.ops.activation import canonical
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.layers.attention import PagedContext


class CausalConv1d(Recurrent):
    """Each channel over its own past (arXiv:2312.00752, section 3.4); weights are the caller's.

    Args:
        channels: C.
        taps: W; the state is the last W - 1 inputs.
        activation: of the result, any name that Activation takes; `identity` for none.
        bias: whether a bias is given.
        dtype: of the inputs.
        name: see Recurrent.
        context: see Recurrent.
    """

    causal_conv1d: Callable[..., Any]
    dtype_mark: Tensor

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        activation: str = "identity",
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        name: str = "",
        context: PagedContext | None = None,
    ) -> None:
        super().__init__(name=name, context=context)
        self.channels, self.taps, self.bias = channels, taps, bias
        self.activation = canonical(activation)
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        self.bind_kernel("causal_conv1d", portable("causal_conv1d"))

    def problems(self) -> dict[str, Problem]:
        facts: dict[str, Any] = {
            "channels": self.channels,
            "taps": self.taps,
            "activation": self.activation,
            "bias": self.bias,
        }
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"causal_conv1d": Problem(op="causal_conv1d", dtype=dtype, facts=facts)}

    def state_shape(self) -> tuple[int, ...]:
        return self.channels, self.taps - 1

    def state_dtype(self) -> torch.dtype:
        return self.dtype_mark.dtype

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[b, L, C], [C, W], [C] and [b, C, W - 1] → [b, L, C] and the new state.

        In the engine the state is the engine's, and so is the one returned.
        """
        batch, length, channels = x.shape
        packed = x.reshape(batch * length, channels)
        held, where = self.states(batch, length, state, x.device)
        y: Tensor = self.causal_conv1d(
            packed,
            weight,
            bias,
            self.activation,
            held,
            where.query_starts,
            where.state_slots,
            where.seen,
            where.max_query,
        )
        return y.view(batch, length, channels), held

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.taps} taps, {self.activation}"
