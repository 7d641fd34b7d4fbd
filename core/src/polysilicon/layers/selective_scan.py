"""Mamba-1's selective scan as a layer without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.layers.base import dtype_name, portable
from polysilicon.layers.recurrent import Recurrent
from polysilicon.layers.state_space import CHUNK
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.layers.attention import PagedContext


class SelectiveScan(Recurrent):
    """S ← exp(a · dt) · S + dt · x ⊗ b, y = S · c + d · x for each channel (arXiv:2312.00752).

    Args:
        channels: C.
        state_size: n.
        softplus: whether dt is made positive by a softplus, after its bias.
        dtype: of the inputs; the state is float32.
        name: see Recurrent.
        context: see Recurrent.
    """

    selective_scan: Callable[..., Any]
    dtype_mark: Tensor

    def __init__(
        self,
        channels: int,
        state_size: int,
        *,
        softplus: bool = True,
        dtype: torch.dtype = torch.float32,
        name: str = "",
        context: PagedContext | None = None,
    ) -> None:
        super().__init__(name=name, context=context)
        self.channels, self.state_size, self.softplus = channels, state_size, softplus
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        self.bind_kernel("selective_scan", portable("selective_scan"))

    def problems(self) -> dict[str, Problem]:
        facts: dict[str, Any] = {
            "channels": self.channels,
            "state": self.state_size,
            "chunk": CHUNK,
        }
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"selective_scan": Problem(op="selective_scan", dtype=dtype, facts=facts)}

    def state_shape(self) -> tuple[int, ...]:
        return self.channels, self.state_size

    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Twice [b, L, C], [C, n], twice [b, L, n], twice [C] and [b, C, n] → y and state.

        In the engine the state is the engine's, and so is the one returned.
        """
        batch, length = x.shape[:2]
        held, where = self.states(batch, length, state, x.device)
        packed = [value.reshape(batch * length, value.shape[-1]) for value in (x, dt, b, c)]
        y: Tensor = self.selective_scan(
            packed[0],
            packed[1],
            a,
            packed[2],
            packed[3],
            d,
            dt_bias,
            self.softplus,
            CHUNK,
            held,
            where.query_starts,
            where.state_slots,
            where.seen,
            where.max_query,
        )
        return y.view(x.shape), held

    def extra_repr(self) -> str:
        return f"{self.channels} × {self.state_size}"
