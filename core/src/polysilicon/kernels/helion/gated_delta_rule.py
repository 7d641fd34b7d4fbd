# mypy: disable-error-code="untyped-decorator,no-any-return"
"""gated_delta_rule in Helion: a state stays in registers while its sequence's tokens pass by.

One program serves some value numbers of one head of one sequence. That is right for any lengths and
made for decode steps; a long prompt is better solved chunk by chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import helion
import helion.language as hl
import torch
from torch import Tensor

from polysilicon.kernels import state_walks

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONFIG = helion.Config(block_sizes=[32], num_warps=8, num_stages=1)


def program(
    q: Tensor,  # [T, hk, dk]
    k: Tensor,  # [T, hk, dk]
    v: Tensor,  # [T, hv, dv]
    g: Tensor,  # [T, hv]
    beta: Tensor,  # [T, hv]
    state: Tensor,  # float32 [slots, hv, dk, dv], written
    query_starts: Tensor,  # int32 [B + 1]
    state_slots: Tensor,  # int32 [B]
    seen: Tensor,  # int32 [B]
    out: Tensor,  # [T, hv, dv], written where a sequence has a token
    scale: float,
    normalize: hl.constexpr,
    shared: int,  # value heads of a key head
) -> None:
    """The recurrence of arXiv:2412.06464, one token at a time, in float32."""
    sequences, heads, values = state_slots.size(0), v.size(1), v.size(2)
    for one, row, numbers in hl.tile([sequences, heads, values], block_size=[1, 1, None]):
        sequence, head = one.begin, row.begin
        begin = query_starts[sequence]
        end = query_starts[sequence + 1]
        fresh = seen[sequence] == 0
        first = state_slots[sequence]
        lives = (first >= 0) & (end > begin)
        # Once or not at all: a loop's counter is what Helion addresses a row of the states by.
        for slot in hl.grid(first, torch.where(lives, first + 1, first)):
            # Where nothing came before, the state may hold anything: it is not multiplied by zero.
            held = torch.where(fresh, 0.0, state[slot, head, :, numbers])
            for token in hl.grid(begin, end):
                query = q[token, head // shared, :].to(torch.float32)
                key = k[token, head // shared, :].to(torch.float32)
                if normalize:
                    query = query * torch.rsqrt((query * query).sum(-1) + 1e-6)
                    key = key * torch.rsqrt((key * key).sum(-1) + 1e-6)
                held = held * torch.exp(g[token, head].to(torch.float32))
                wrong = v[token, head, numbers].to(torch.float32) - (held * key[:, None]).sum(0)
                step = wrong * beta[token, head].to(torch.float32)
                held = held + key[:, None] * step[None, :]
                out[token, head, numbers] = ((held * query[:, None]).sum(0) * scale).to(out.dtype)
            state[slot, head, :, numbers] = held


compiled: Callable[..., None] = helion.kernel(
    program, config=CONFIG, static_shapes=False, index_dtype=torch.int64
)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    normalize: bool,
    chunk: int,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """The op's contract (polysilicon/ops/gated_delta_rule.py)."""
    del chunk, max_query
    sequences = (query_starts, state_slots, seen)
    return state_walks.delta_rule(compiled, (q, k, v, g, beta), state, sequences, scale, normalize)


#: Type in the programs below → what stands for it, so that one program serves all dtypes.
TYPES = {"tl.bfloat16": "out.dtype.element_ty"}


def examples() -> dict[str, tuple[Any, ...]]:
    """Exported program → arguments of a call that it is made from.

    No size is one, and no tensor another one: Helion would make one argument of two.
    """

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    rows = (tensor(7, 2, 16), tensor(7, 2, 16), tensor(7, 4, 64), tensor(7, 4), tensor(7, 4))
    integers = (tensor(size, dtype=torch.int32) for size in (4, 3, 3))
    call = (*rows, tensor(5, 4, 16, 64, dtype=torch.float32), *integers, tensor(7, 4, 64), 1.0)
    return {"unit_length": (*call, True, 2), "as_given": (*call, False, 2)}
