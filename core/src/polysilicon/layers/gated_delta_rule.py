"""The gated delta rule as a layer without weights."""

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


class GatedDeltaRule(Recurrent):
    """Linear attention whose state forgets and corrects itself (arXiv:2412.06464).

    Args:
        key_heads: hk, of `head_size` numbers each.
        value_heads: hv, of `v_head_size` numbers each; a multiple of hk.
        head_size: dk.
        v_head_size: dv.
        scale: factor of the queries.
        normalize: whether queries and keys are made of unit length first.
        by_channel: whether a head has a decay for each of its key channels (arXiv:2510.26692).
        dtype: of the inputs; the state is float32.
        name: see Recurrent.
        context: see Recurrent.

    Raises:
        ValueError: the value heads are no multiple of the key heads.
    """

    gated_delta_rule: Callable[..., Any]
    dtype_mark: Tensor

    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        head_size: int,
        v_head_size: int,
        *,
        scale: float,
        normalize: bool = True,
        by_channel: bool = False,
        dtype: torch.dtype = torch.float32,
        name: str = "",
        context: PagedContext | None = None,
    ) -> None:
        super().__init__(name=name, context=context)
        if key_heads < 1 or value_heads % key_heads:
            raise ValueError(
                f"GatedDeltaRule {name!r} has {value_heads} value heads and {key_heads} key heads: "
                "the value heads must be a multiple of the key heads"
            )
        self.key_heads, self.value_heads = key_heads, value_heads
        self.head_size, self.v_head_size = head_size, v_head_size
        self.scale, self.normalize, self.by_channel = float(scale), normalize, by_channel
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        self.bind_kernel("gated_delta_rule", portable("gated_delta_rule"))

    def problems(self) -> dict[str, Problem]:
        facts: dict[str, Any] = {
            "key_heads": self.key_heads,
            "value_heads": self.value_heads,
            "head_size": self.head_size,
            "v_head_size": self.v_head_size,
            "normalize": self.normalize,
            "by_channel": self.by_channel,
            "chunk": CHUNK,
        }
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"gated_delta_rule": Problem(op="gated_delta_rule", dtype=dtype, facts=facts)}

    def state_shape(self) -> tuple[int, ...]:
        return self.value_heads, self.head_size, self.v_head_size

    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Twice [b, L, hk, dk], [b, L, hv, dv], twice [b, L, hv] and [b, hv, dk, dv] → y, state.

        With decays by channel g is [b, L, hv, dk].
        In the engine the state is the engine's, and so is the one returned.
        """
        batch, length = v.shape[:2]
        held, where = self.states(batch, length, state, v.device)
        packed = [x.reshape(batch * length, *x.shape[2:]) for x in (q, k, v, g, beta)]
        y: Tensor = self.gated_delta_rule(
            *packed,
            self.scale,
            self.normalize,
            CHUNK,
            held,
            where.query_starts,
            where.state_slots,
            where.seen,
            where.max_query,
        )
        return y.view(v.shape), held

    def extra_repr(self) -> str:
        return f"{self.key_heads} × {self.head_size}, {self.value_heads} × {self.v_head_size}"
