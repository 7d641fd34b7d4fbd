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
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    IntArray = NDArray[np.int32]

#: Queries of one chunk that needs a mask: bounds the mask, and lets a window skip keys.
CHUNK = 512


class Rule(NamedTuple):
    """Which keys a query sees."""

    window: int  # 0: none
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
class Chunk:
    """Queries that one attention call serves, and the keys that they need.

    Attributes:
        first, last: the queries among the step's tokens; `queries` is their number.
        keys: how many keys; all that any of the queries sees.
        start: slot of the first key where the keys are adjacent, else -1.
        slots: int64 [keys], the slot of every key where they are not.
        triangle: query i sees keys 0..i, which needs no mask.
        mask: to add to the scores, [queries, keys]; None where every query sees every key.
    """

    first: int
    last: int
    queries: int
    keys: int
    start: int
    slots: Tensor | None
    triangle: bool
    mask: Tensor | None

    def read(self, cache: Tensor) -> Tensor:
        """Their keys or values as [1, hk, keys, d]: a view where the layout allows it."""
        if self.slots is None and slots_are_rows(cache):
            _, _, heads, size = cache.shape
            _, slot, head, element = cache.stride()
            # One view instead of the four (flatten, slice, transpose, unsqueeze) that say the same.
            return cache.as_strided(
                (1, heads, self.keys, size),
                (0, head, slot, element),
                cache.storage_offset() + self.start * slot,
            )
        return self._gathered(cache).transpose(0, 1)[None]

    def _gathered(self, cache: Tensor) -> Tensor:  # [keys, hk, d]
        slots = self.slots
        if slots is None:
            slots = torch.arange(self.start, self.start + self.keys, device=cache.device)
        if slots_are_rows(cache):
            return cache.view(-1, *cache.shape[2:]).index_select(0, slots)
        block_size = cache.shape[1]
        return cache[slots // block_size, slots % block_size]


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences of a step that have queries."""

    sequences: tuple[Sequence, ...]
    tokens: int  # without padding
    _chunks: dict[tuple[Rule, torch.dtype], tuple[Chunk, ...]] = field(default_factory=dict)

    def chunks(self, rule: Rule, q: Tensor) -> tuple[Chunk, ...]:
        """The calls that serve the step, in the order of its tokens."""
        key = (rule, q.dtype)
        found = self._chunks.get(key)
        if found is None:
            found = tuple(chunk for one in self.sequences for chunk in _chunks(one, rule, q))
            self._chunks[key] = found
        return found


def _chunks(sequence: Sequence, rule: Rule, q: Tensor) -> Iterator[Chunk]:
    queries = sequence.last - sequence.first
    # From-scratch prefill is the square triangle, which the fused kernel knows without a mask.
    triangle = rule.causal and queries == sequence.length and not 0 < rule.window < queries
    step = queries if triangle else CHUNK
    for first in range(0, queries, step):
        yield _chunk(sequence, first, min(queries, first + step), rule, q)


def _chunk(sequence: Sequence, first: int, last: int, rule: Rule, q: Tensor) -> Chunk:
    (window, causal), queries = rule, last - first
    position = sequence.length - (sequence.last - sequence.first) + first
    start = max(0, position - window + 1) if window else 0
    stop = position + queries if causal else sequence.length
    if window and not causal:
        stop = min(stop, position + queries - 1 + window)
    keys = stop - start
    # One query sees all that is left; a square that no window cuts is the triangle.
    triangle = causal and 1 < queries == keys and not 0 < window < keys
    mask = None
    if queries > 1 and not triangle and (causal or window):
        seen = visibility(position - start, queries, keys, causal, window, q.device)
        mask = q.new_zeros(queries, keys).masked_fill_(~seen, -math.inf)
    return Chunk(
        first=sequence.first + first,
        last=sequence.first + last,
        queries=queries,
        keys=keys,
        start=sequence.start + start,
        slots=None if sequence.slots is None else sequence.slots[start:stop],
        triangle=triangle,
        mask=mask,
    )


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
    tables, bounds, lengths = map(_host, (block_tables, query_starts, kv_lengths))
    key = (
        tables.tobytes(),
        bounds.tobytes(),
        lengths.tobytes(),
        cache_shape[:2],
        tokens,
        block_tables.device,
    )
    last = _last
    if last is None or last[0] != key:
        plan = _build(tables, bounds, lengths, cache_shape, tokens, block_tables.device)
        _last = last = (key, plan)
    return last[1]


def _host(tensor: Tensor) -> IntArray:
    array: IntArray = (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
    return array


def _build(
    tables: IntArray,
    bounds: IntArray,
    lengths: IntArray,
    cache_shape: torch.Size,
    tokens: int,
    device: torch.device,
) -> Plan:
    blocks, block_size = cache_shape[:2]
    rising = bounds[0] == 0 and (bounds[1:] >= bounds[:-1]).all()
    if not rising or bounds[-1] > tokens or len(bounds) != len(lengths) + 1:
        raise ValueError(
            f"query_starts {bounds.tolist()} does not fit {tokens} tokens of {len(lengths)} "
            "sequences: expected 0, then the end of each sequence, rising"
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
    return Plan(sequences=tuple(sequences), tokens=int(bounds[-1]))


def _sequence(
    first: int, last: int, length: int, used: IntArray, block_size: int, device: torch.device
) -> Sequence:
    start = int(used[0])
    if (used[1:] - used[:-1] == 1).all():
        return Sequence(first, last, length, start * block_size, None)
    offsets = torch.arange(block_size)
    table = torch.from_numpy(used.astype("int64"))
    slots = (table[:, None] * block_size + offsets).view(-1)[:length]
    return Sequence(first, last, length, -1, slots.to(device))
