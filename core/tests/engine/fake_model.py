"""A model without weights: its cache holds the tokens themselves, its answer depends on all of them.

A wrong block table, slot, length or a block shared with the wrong content changes what it reads
back, and with that every token that follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.layers.attention import PagedBatch

VOCABULARY = 50


def next_token(tokens: Sequence[int]) -> int:
    """What follows a sequence."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCABULARY


def continued(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The greedy answer to a prompt, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


class FakeForward:
    """Serves paged batches; `broken` tokens raise when they are computed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache = torch.full((num_blocks, block_size), -1)
        self.broken: set[int] = set()
        self.calls: list[int] = []

    def __call__(
        self, batch: PagedBatch, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        ids, size = input_ids[0], self.cache.shape[1]
        self.calls.append(len(ids))
        if self.broken.intersection(ids.tolist()):
            raise RuntimeError("a broken token was computed")
        stored = batch.slots >= 0
        self.cache.view(-1)[batch.slots[stored]] = ids[stored]
        logits = torch.zeros(len(rows), VOCABULARY)
        for index, row in enumerate(rows.tolist()):
            sequence = int(torch.searchsorted(batch.query_starts, row, right=True)) - 1
            if sequence >= len(batch.kv_lengths) or not batch.kv_lengths[sequence]:
                continue
            behind = int(batch.query_starts[sequence + 1]) - row - 1
            length = int(batch.kv_lengths[sequence]) - behind
            assert int(position_ids[0, row]) == length - 1
            table = batch.block_tables[sequence, : -(-length // size)].long()
            seen = self.cache[table].view(-1)[:length].tolist()
            logits[index, next_token(seen)] = 1.0
        return logits
