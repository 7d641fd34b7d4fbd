"""Runs one step of the model: lays the planned tokens end to end and calls it once.

The host side of a step is written into buffers that live as long as the runner; what changed
little since the last step is not written again. T tokens, B requests, n sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from polysilicon.layers.attention import PagedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.engine.scheduler import Work


class Forward(Protocol):
    """The model over one paged batch."""

    def __call__(
        self,
        batch: PagedBatch,
        input_ids: Tensor,  # int64 [1, T]
        position_ids: Tensor,  # int64 [1, T]
        rows: Tensor,  # int64 [n], tokens whose logits are wanted
    ) -> Tensor:  # [n, V]
        """Stores the batch's keys and values, and returns the logits of the wanted tokens."""
        ...


@dataclass(frozen=True)
class Shape:
    """The shape a step is padded to."""

    tokens: int
    batch: int
    rows: int
    max_query: int


class Buckets:
    """The shapes that a compiled model is called with: every step is padded to one of them.

    Decode steps have as many tokens as requests; all other steps have room for the whole batch.
    """

    def __init__(self, tokens: Sequence[int], *, max_batch: int, max_tokens: int) -> None:
        # Few, because each costs a compilation; a device that wants others names them.
        sizes = sorted({*(tokens or (1, 64)), max_batch, max_tokens})
        self._decode = [Shape(n, n, n, 1) for n in sizes if n <= max_batch]
        mixed = [n for n in sizes if max_batch < n <= max_tokens] or [max_tokens]
        self._mixed = [Shape(n, max_batch, max_batch, n) for n in mixed if n > 1]
        self.mixed_sizes = tuple(mixed)

    def all(self) -> list[Shape]:
        """Every shape, smallest first."""
        return [*self._decode, *self._mixed]

    def fit(self, tokens: int, batch: int) -> Shape:
        """The smallest shape that holds a step."""
        shapes = self._decode if tokens == batch else self._mixed
        return next(shape for shape in shapes if shape.tokens >= tokens)


class Runner:
    """Builds the tensors of a step and calls the model with them."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        max_batch: int,
        max_tokens: int,
        block_size: int,
        max_blocks: int,  # of one request
        buckets: Buckets | None = None,
        carries_state: bool = False,
    ) -> None:
        self._forward = forward
        self._device = device
        self._block_size = block_size
        self._max_kv = max_blocks * block_size
        self._buckets = buckets
        self._carries_state = carries_state
        self._positions = np.arange(self._max_kv, dtype=np.int64)
        self._held: list[tuple[int, int, int]] = [(-1, 0, 0)] * max_batch
        self._buffers: dict[str, np.ndarray] = {
            "ids": np.zeros(max_tokens, np.int64),
            "positions": np.zeros(max_tokens, np.int64),
            "slots": np.zeros(max_tokens, np.int64),
            "rows": np.zeros(max_batch, np.int64),
            "starts": np.zeros(max_batch + 1, np.int32),
            "lengths": np.zeros(max_batch, np.int32),
            "states": np.zeros(max_batch, np.int32),
            "tables": np.zeros((max_batch, max_blocks), np.int32),
        }
        self._tensors = {name: torch.from_numpy(data) for name, data in self._buffers.items()}

    @property
    def shapes(self) -> list[Shape]:
        """The shapes that steps are padded to; empty when they are not padded."""
        return self._buckets.all() if self._buckets else []

    def run(self, works: Sequence[Work]) -> Tensor:  # [n, V]
        """Logits for each piece of work that samples, in the order of `works`."""
        tokens = self._fill(works)
        rows = sum(work.samples for work in works)
        if self._buckets is None:
            longest = max(work.count for work in works)
            reach = max(work.start + work.count for work in works)
            shape = Shape(tokens, len(works), rows, longest)
            return self._call(shape, max_kv=reach)
        shape = self._buckets.fit(tokens, len(works))
        self._pad(shape, tokens, len(works), rows)
        return self._call(shape, max_kv=self._max_kv)[:rows]

    def warm_up(self, shape: Shape) -> None:
        """Calls the model in one shape with padding only."""
        self._pad(shape, 0, 0, 0)
        self._call(shape, max_kv=self._max_kv)

    def _call(self, shape: Shape, *, max_kv: int) -> Tensor:
        def part(name: str, length: int) -> Tensor:
            piece = self._tensors[name][:length]
            # A copy even on the CPU would cost more than it protects: nothing outlives the step.
            return piece if self._device.type == "cpu" else piece.to(self._device)

        batch = PagedBatch(
            slots=part("slots", shape.tokens),
            block_tables=part("tables", shape.batch),
            query_starts=part("starts", shape.batch + 1),
            kv_lengths=part("lengths", shape.batch),
            state_slots=part("states", shape.batch) if self._carries_state else None,
            max_query=shape.max_query,
            max_kv=max_kv,
        )
        ids, positions = part("ids", shape.tokens), part("positions", shape.tokens)
        return self._forward(batch, ids[None], positions[None], part("rows", shape.rows))

    def _fill(self, works: Sequence[Work]) -> int:
        """Writes the step into the buffers and returns its number of tokens."""
        data, size = self._buffers, self._block_size
        ids, positions, slots, rows = data["ids"], data["positions"], data["slots"], data["rows"]
        starts, lengths, states = data["starts"], data["lengths"], data["states"]
        token = row = 0
        for index, work in enumerate(works):
            request, start, end = work.request, work.start, work.start + work.count
            self._write_table(index, work)
            states[index] = request.state_slot
            if work.count == 1:
                ids[token] = request.tokens[start]
                positions[token] = start
                slots[token] = request.blocks[start // size] * size + start % size
            else:
                until = token + work.count
                span = self._positions[start:end]
                ids[token:until] = request.tokens[start:end]
                positions[token:until] = span
                slots[token:until] = data["tables"][index][span // size] * size + span % size
            token += work.count
            starts[index + 1] = token
            lengths[index] = end
            if work.samples:
                rows[row] = token - 1
                row += 1
        return token

    def _write_table(self, index: int, work: Work) -> None:
        """Writes a request's block table, or only what was appended since the last step."""
        request = work.request
        number, admission, written = self._held[index]
        blocks = request.blocks
        if number != request.id or admission != request.preemptions:
            written = 0
        if written < len(blocks):
            self._buffers["tables"][index, written : len(blocks)] = blocks[written:]
        self._held[index] = (request.id, request.preemptions, len(blocks))

    def _pad(self, shape: Shape, tokens: int, batch: int, rows: int) -> None:
        """Fills the rest of a shape with tokens that are stored nowhere and belong to nobody."""
        data = self._buffers
        data["ids"][tokens : shape.tokens] = 0
        data["positions"][tokens : shape.tokens] = 0
        data["slots"][tokens : shape.tokens] = -1
        data["starts"][batch + 1 : shape.batch + 1] = tokens
        data["lengths"][batch : shape.batch] = 0
        data["states"][batch : shape.batch] = -1
        data["rows"][rows : shape.rows] = 0
