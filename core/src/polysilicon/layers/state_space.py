"""Mamba-2's state-space recurrence as a layer without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.layers.base import dtype_name, portable
from polysilicon.layers.recurrent import Recurrent
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.layers.attention import PagedContext

#: Tokens of a chunk: the products inside it grow with its square, those between chunks fall.
CHUNK = 64


class StateSpace(Recurrent):
    """S ← exp(a · dt) · S + dt · x ⊗ b, y = S · c + d · x (arXiv:2405.21060).

    Args:
        heads: h, of `head_size` numbers each.
        head_size: p.
        groups: g; a group's b and c serve h / g heads.
        state_size: n.
        softplus: whether dt is made positive by a softplus, after its bias.
        limits: smallest and largest dt.
        dtype: of the inputs; the state is float32.
        name: see Recurrent.
        context: see Recurrent.
    """

    ssd: Callable[..., Any]
    dtype_mark: Tensor

    def __init__(
        self,
        heads: int,
        head_size: int,
        groups: int,
        state_size: int,
        *,
        softplus: bool = True,
        limits: tuple[float, float] = (0.0, float("inf")),
        dtype: torch.dtype = torch.float32,
        name: str = "",
        context: PagedContext | None = None,
    ) -> None:
        super().__init__(name=name, context=context)
        self.heads, self.head_size, self.groups, self.state_size = (
            heads,
            head_size,
            groups,
            state_size,
        )
        self.softplus, self.limits = softplus, limits
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        self.bind_kernel("ssd", portable("ssd"))

    def problems(self) -> dict[str, Problem]:
        facts: dict[str, Any] = {
            "heads": self.heads,
            "head_size": self.head_size,
            "groups": self.groups,
            "state": self.state_size,
            "chunk": CHUNK,
        }
        return {"ssd": Problem(op="ssd", dtype=dtype_name(self.dtype_mark.dtype), facts=facts)}

    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_size, self.state_size

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
        """[b, L, h, p], [b, L, h], [h], twice [b, L, g, n], [h], [h] and [b, h, p, n] → y, state.

        In the engine the state is the engine's, and so is the one returned.
        """
        batch, length = x.shape[:2]
        held, where = self.states(batch, length, state, x.device)
        packed = [value.reshape(batch * length, *value.shape[2:]) for value in (x, dt, b, c)]
        y: Tensor = self.ssd(
            packed[0],
            packed[1],
            a,
            packed[2],
            packed[3],
            d,
            dt_bias,
            self.softplus,
            *self.limits,
            CHUNK,
            held,
            where.query_starts,
            where.state_slots,
            where.seen,
            where.max_query,
        )
        return y.view(x.shape), held

    def extra_repr(self) -> str:
        return f"{self.heads} × {self.head_size}, {self.groups} × {self.state_size}"
