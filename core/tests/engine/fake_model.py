"""A model without weights: its cache holds tokens, and its answer depends on all of them.

A wrong block table, slot, length or a block shared with the wrong content changes what it reads
back, and with that every token that follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polysilicon.devices import find
from polysilicon.engine.model import PagedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.layers.attention import PagedBatch
    from polysilicon.prepare import Row

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


class FakeRecurrence:
    """Answers from a state a sequence alone, as FakeForward does from its cache.

    A broken token raises after all states have moved on, as a later layer would.
    """

    def __init__(self, slots: int) -> None:
        self.states = [-1] * slots
        self.broken: set[int] = set()
        self.calls: list[int] = []

    def __call__(
        self, batch: PagedBatch, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        assert batch.state_slots is not None
        assert batch.seen is not None
        ids, starts = input_ids[0].tolist(), batch.query_starts.tolist()
        self.calls.append(len(ids))
        used = [slot for slot in batch.state_slots.tolist() if slot >= 0]
        assert len(set(used)) == len(used), "two sequences of a step have one state"
        after: dict[int, int] = {}  # token of the step → the state that it left
        for row, slot in enumerate(batch.state_slots.tolist()):
            begin, end = starts[row : row + 2]
            if slot < 0 or begin == end:
                continue
            state = self.states[slot] if batch.seen[row] else 17
            for token in range(begin, end):
                state = (state * 31 + ids[token] + 7) % 1_000_003
                after[token] = state
            self.states[slot] = state
        if self.broken.intersection(ids):
            raise RuntimeError("a broken token was computed")
        logits = torch.zeros(len(rows), VOCABULARY)
        for index, row in enumerate(rows.tolist()):
            if row in after:
                logits[index, after[row] % VOCABULARY] = 1.0
        return logits


class FakeModel(PagedModel):
    """What the engine needs of a model, around FakeForward; `silent` ends in NaN logits.

    With `states` it has no cache but so many rows of states.
    """

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, context: int = 200, states: int = 0
    ) -> None:
        self.device = find("cpu")
        self.torch_device = torch.device("cpu")
        self.dtype = torch.float32
        self.vocabulary, self.context = VOCABULARY, context
        self.stop_ids = frozenset()
        self.num_blocks, self.block_size = num_blocks, block_size
        self.graphs = []
        self.states = states
        self.forward: FakeForward | FakeRecurrence = FakeForward(num_blocks, block_size)
        if states:
            self.forward = FakeRecurrence(states)
        self.silent: set[int] = set()

    @property
    def carries_state(self) -> bool:
        return self.states > 0

    @property
    def rows(self) -> tuple[Row, ...]:
        return ()

    def __call__(
        self, batch: PagedBatch, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        logits = self.forward(batch, input_ids, position_ids, rows)
        for index, row in enumerate(rows.tolist()):
            if int(input_ids[0, row]) in self.silent:
                logits[index] = float("nan")
        return logits

    def kernel_failed(self, error: BaseException) -> None:
        return None


class FakeTokenizer:
    """Tokens 0–25 are letters, 26 a space, 30–32 the bytes of one character, 49 is special."""

    eos_token_id = None
    chat_template = None
    letters = "abcdefghijklmnopqrstuvwxyz "

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": [self.letters.index(letter) for letter in text]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        euro = dict(zip((30, 31, 32), "€".encode(), strict=True))
        data = b"".join(
            bytes([euro[i]]) if i in euro else b"" if i == 49 else self._letter(i) for i in ids
        )
        return data.decode(errors="replace")

    def _letter(self, token: int) -> bytes:
        return self.letters[token].encode() if token < len(self.letters) else b"#"
