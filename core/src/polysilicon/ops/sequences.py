"""Sequences laid end to end with a state each: how the kernels of recurrent ops walk over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from polysilicon.ops.samples import Source


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one length, which a kernel computes at once.

    Attributes:
        length: tokens of each.
        start: first of their tokens where they follow each other, else -1.
        tokens: int64 [sequences, length], rows of the packed tensors.
        slots: int64 [sequences], rows of the states.
        carried: bool [sequences], whether the state holds what came before.
    """

    length: int
    start: int
    tokens: Tensor
    slots: Tensor
    carried: Tensor

    def read(self, packed: Tensor) -> Tensor:
        """Their rows of [T, ...] as [sequences, length, ...]: a view where they are adjacent."""
        if self.start < 0:
            return packed[self.tokens]
        rows = packed[self.start : self.start + self.tokens.numel()]
        return rows.view(*self.tokens.shape, *packed.shape[1:])

    def write(self, packed: Tensor, values: Tensor) -> None:
        """Puts [sequences, length, ...] into their rows of [T, ...]."""
        if self.start < 0:
            packed[self.tokens] = values.to(packed.dtype)
        else:
            self.read(packed).copy_(values)

    def load(self, state: Tensor) -> Tensor:
        """A copy of the sequences' states, zero for those that begin."""
        before = state[self.slots]
        shape = (-1,) + (1,) * (before.dim() - 1)
        return before.masked_fill_(~self.carried.view(shape), 0)


_last: tuple[object, list[Group]] | None = None


def groups(query_starts: Tensor, state_slots: Tensor, seen: Tensor) -> list[Group]:
    """The sequences that have tokens and a state, by length; see `layers.recurrent.Sequences`.

    Every recurrent layer of a model asks for the same ones: the previous answer is given again
    when the numbers are the same.
    """
    global _last
    host = [x.cpu().numpy() for x in (query_starts, state_slots, seen)]
    key = (*(x.tobytes() for x in host), query_starts.device)
    last = _last
    if last is None or last[0] != key:
        starts, slots, before = (x.tolist() for x in host)
        _last = last = (key, _grouped(starts, slots, before, query_starts.device))
    return last[1]


def _grouped(
    starts: list[int], slots: list[int], before: list[int], device: torch.device
) -> list[Group]:
    found: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        length = starts[row + 1] - starts[row]
        if length and slot >= 0:
            found.setdefault(length, []).append(row)
    made: list[Group] = []
    for length, rows in found.items():
        firsts = [starts[row] for row in rows]
        adjacent = firsts == list(range(firsts[0], firsts[0] + length * len(rows), length))
        where = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        made.append(
            Group(
                length=length,
                start=firsts[0] if adjacent else -1,
                tokens=where,
                slots=torch.tensor([slots[row] for row in rows], device=device),
                carried=torch.tensor([before[row] > 0 for row in rows], device=device),
            )
        )
    return made


def walk(
    shape: torch.Size,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    advance: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> Tensor:
    """A recurrence in float64, token by token: what the references of recurrent ops share.

    Args:
        shape: of the results, [T, ...].
        state: [slots, ...], moved on in place.
        query_starts, state_slots, seen: see `layers.recurrent.Sequences`.
        advance: state and token → the state after it, and its result.
    """
    out = torch.zeros(shape, dtype=torch.float64, device=state.device)
    starts = query_starts.tolist()
    for row, slot in enumerate(state_slots.tolist()):
        if slot < 0 or starts[row] == starts[row + 1]:
            continue
        held = state[slot].double() if seen[row] else torch.zeros_like(state[slot]).double()
        for token in range(starts[row], starts[row + 1]):
            held, out[token] = advance(held, token)
        state[slot] = held.to(state.dtype)
    return out


#: name → lengths, slots and tokens seen before, of the sequences of one sample.
MIXTURES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "nothing": ((), (), ()),
    "one token": ((1,), (2,), (0,)),
    "decode": ((1, 1, 1), (3, 0, 4), (7, 1, 0)),
    "prefill": ((17,), (1,), (0,)),
    "chunk with a past": ((65,), (0,), (9,)),
    "mixture": ((5, 1, 1, 16, 5), (4, 2, 0, 3, 1), (0, 3, 8, 2, 1)),
    "padding": ((4, 0, 2), (1, -1, 3), (0, 0, 5)),
}
SLOTS = 5


def layout(name: str, source: Source) -> tuple[int, dict[str, object]]:
    """Number of packed tokens and the last arguments of a recurrent op; padding adds three."""
    lengths, slots, seen = MIXTURES[name]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def integers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=source.device)

    tokens = starts[-1] + (3 if name == "padding" else 0)
    return tokens, {
        "query_starts": integers(starts),
        "state_slots": integers(slots),
        "seen": integers(seen),
        "max_query": max(lengths, default=1),
    }


def decoding(tokens: int, device: torch.device) -> dict[str, object]:
    """The last arguments of a step in which `tokens` sequences each go on by one token."""
    ones = torch.ones(tokens, dtype=torch.int32, device=device)
    rows = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    return {"query_starts": rows, "state_slots": rows[:-1], "seen": ones, "max_query": 1}


def spoil(state: Tensor, name: str) -> Tensor:
    """NaN in the states that no sequence may read: those of nobody, and of those that begin."""
    _, slots, seen = MIXTURES[name]
    read = {slot for slot, before in zip(slots, seen, strict=True) if before}
    for slot in set(range(len(state))) - read:
        state[slot] = torch.nan
    return state
