"""What one step's metadata means for PyTorch on the host, worked out once and shared by all layers.

Every layer of a model calls paged attention with the same tables and lengths. Their bytes are
compared with the previous call's (about 2 µs), so a plan can be neither stale nor rebuilt by layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from polysilicon.ops.attention import visibility
from polysilicon.ops.kv_store import slots_are_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    IntArray = NDArray[np.int32]


class Rule(NamedTuple):
    """How scores become weights."""

    scale: float
    window: int
    softcap: float
    causal: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a step.

    Attributes:
        first, last: its queries among the step's tokens.
        length: its tokens in the cache.
        start: slot of its first token where its blocks are adjacent, else -1.
        slots: int64 [length], the slot of every token where they are not.
    """

    first: int
    last: int
    length: int
    start: int
    slots: Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences that have queries, and the masks that their layers share."""

    sequences: tuple[Sequence, ...]
    tokens: int  # without padding
    single: bool  # one sequence owns every row of q
    _masks: dict[tuple[int, int, int, int, bool], Tensor] = field(default_factory=dict)

    def read(self, rows: Tensor, sequence: Sequence, start: int, stop: int) -> Tensor:
        """Tokens start..stop of a sequence as [1, hk, tokens, d]: a view where that is possible."""
        if sequence.slots is None:
            part = rows[sequence.start + start : sequence.start + stop]
        else:
            part = rows.index_select(0, sequence.slots[start:stop])
        return part.transpose(0, 1)[None]

    def mask(self, first: int, rows: int, columns: int, rule: Rule, device: torch.device) -> Tensor:
        """The float32 mask of one chunk, [rows, columns]."""
        key = (first, rows, columns, rule.window, rule.causal)
        if key not in self._masks:
            seen = visibility(first, rows, columns, rule.causal, rule.window, device)
            zeros = torch.zeros(rows, columns, device=device)
            self._masks[key] = zeros.masked_fill_(~seen, -math.inf)
        return self._masks[key]


_last: tuple[object, Plan] | None = None


def plan_for(
    block_tables: Tensor,  # int32 [B, max_blocks]
    query_starts: Tensor,  # int32 [B + 1]
    kv_lengths: Tensor,  # int32 [B]
    cache_shape: torch.Size,
    tokens: int,
) -> Plan:
    """The plan of this step: the previous call's when the metadata is the same."""
    global _last
    tables, bounds, lengths = (
        tensor.cpu().numpy() for tensor in (block_tables, query_starts, kv_lengths)
    )
    key = (
        tables.tobytes(),
        bounds.tobytes(),
        lengths.tobytes(),
        cache_shape[:2],
        tokens,
        block_tables.device,
    )
    if _last is None or _last[0] != key:
        _last = key, _build(tables, bounds, lengths, cache_shape, tokens, block_tables.device)
    return _last[1]


def _build(
    tables: IntArray,
    bounds: IntArray,
    lengths: IntArray,
    cache_shape: torch.Size,
    tokens: int,
    device: torch.device,
) -> Plan:
    blocks, block_size = cache_shape[:2]
    if bounds[-1] > tokens or len(bounds) != len(lengths) + 1:
        raise ValueError(
            f"query_starts {bounds.tolist()} does not fit {tokens} tokens of {len(lengths)} "
            "sequences: give one start a sequence and then the end of the last"
        )
    sequences = []
    for row, length in enumerate(lengths.tolist()):
        first, last = int(bounds[row]), int(bounds[row + 1])
        if last == first:
            continue
        used = tables[row, : -(-length // block_size)]
        if not last - first <= length <= len(used) * block_size:
            raise ValueError(
                f"sequence {row} has {last - first} new tokens, kv_lengths {length} and "
                f"{len(tables[row])} blocks of {block_size}: kv_lengths counts the new tokens too, "
                "and the table must hold a block for each token"
            )
        if used.min() < 0 or used.max() >= blocks:
            raise ValueError(
                f"sequence {row} uses blocks {used.tolist()} of a cache that has {blocks}: "
                "each must lie in it"
            )
        sequences.append(_sequence(first, last, length, used, block_size, device))
    return Plan(
        sequences=tuple(sequences),
        tokens=int(bounds[-1]),
        single=len(sequences) == 1 and sequences[0].first == 0 and sequences[0].last == tokens,
    )


def _sequence(
    first: int, last: int, length: int, used: IntArray, block_size: int, device: torch.device
) -> Sequence:
    start = int(used[0])
    if all(used == range(start, start + len(used))):
        return Sequence(first, last, length, start * block_size, None)
    offsets = torch.arange(block_size)
    table = torch.from_numpy(used.astype("int64"))
    slots = (table[:, None] * block_size + offsets).view(-1)[:length]
    return Sequence(first, last, length, -1, slots.to(device))


def slot_rows(cache: Tensor) -> Tensor:
    """The cache as [slots, hk, d]: a view where its layout keeps slots at one stride."""
    return cache.flatten(0, 1) if slots_are_rows(cache) else cache.reshape(-1, *cache.shape[2:])
