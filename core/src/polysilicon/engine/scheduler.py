"""What each step computes: decode first, then prefill in chunks, within a token budget.

Requests are admitted in order of arrival. One that is admitted gets blocks for all tokens it has;
when a running request then needs one more and none is left, the newest running request gives its
blocks back and is computed again later. The oldest always goes on, so all of them end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from polysilicon.engine.pool import ROOT, BlockPool, block_key
from polysilicon.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polysilicon.engine.request import Request


@dataclass(slots=True, frozen=True)
class Work:
    """Tokens `start` to `start + count` of one request, computed in one step."""

    request: Request
    start: int
    count: int
    samples: bool  # its last token is the last one known, so the next one can be sampled
    published: int  # blocks that the request had offered for sharing before this step


class Scheduler:
    """Continuous batching over one block pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch: int,
        max_tokens_per_step: int,
        sizes: Sequence[int] = (),  # token counts that steps are padded to, rising
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}: expected at least 1")
        if max_tokens_per_step < max_batch:
            raise ValueError(
                f"max_tokens_per_step is {max_tokens_per_step}: expected at least max_batch "
                f"({max_batch}), so that every running request can advance in every step"
            )
        self.pool = pool
        self.max_batch = max_batch
        self.max_tokens_per_step = max_tokens_per_step
        self._sizes = sizes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission, which is order of arrival
        self.preemptions = 0
        self._state_slots = list(range(max_batch))  # rows of states that no request holds

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: the whole pool is too small for it.
        """
        need = self.pool.blocks_for(request.limit - 1)  # the last token is never stored
        if need > self.pool.num_blocks:
            raise RequestError(
                f"the request may grow to {request.limit} tokens (prompt {request.prompt_tokens}), "
                f"which fill {need} blocks of {self.pool.block_size}, and the KV cache has "
                f"{self.pool.num_blocks}: raise num_blocks, or lower max_new_tokens"
            )
        self.waiting.append(request)

    def plan(self) -> list[Work]:
        """The work of the next step; empty when nothing is left to do."""
        budget = self._budget()
        works: list[Work] = []
        # Older requests come first, so a request that must give way has no work planned yet.
        for request in list(self.running):
            if request.blocks and request.pending == 1 and self._grow(request):
                works.append(self._work(request, 1))
                budget -= 1
        for request in self.running:
            if request.pending > 1 and budget > 0:
                works.append(self._work(request, min(request.pending, budget)))
                budget -= works[-1].count
        while self.waiting and len(self.running) < self.max_batch and budget > 0:
            request = self.waiting[0]
            if not self._admit(request):
                break
            works.append(self._work(request, min(request.pending, budget)))
            budget -= works[-1].count
        return works

    def done(self, work: Work) -> None:
        """Notes that a piece of work was computed."""
        request, end = work.request, work.start + work.count
        first_new = max(work.start, request.highest)
        request.recomputed += max(0, min(end, request.highest) - work.start)
        request.prefilled += max(0, min(end, request.prompt_tokens) - first_new)
        request.computed = end
        request.highest = max(request.highest, end)

    def finish(self, request: Request) -> None:
        """Frees all that a running or waiting request holds; what it computed stays for reuse."""
        if request.blocks:
            self.running.remove(request)
            full, rest = divmod(request.computed, self.pool.block_size)
            if rest:
                parent = self._keys(request, full)[full - 1] if full else ROOT
                tokens = request.tokens[full * self.pool.block_size : request.computed]
                self.pool.keep_tail(request.blocks[full], parent, tokens)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks away and queues it to be computed again."""
        self.running.remove(request)
        self._free(request)
        request.preemptions += 1
        self.preemptions += 1
        # Back into the order of arrival, which is the order of ids.
        at = next((i for i, other in enumerate(self.waiting) if other.id > request.id), None)
        self.waiting.insert(len(self.waiting) if at is None else at, request)

    def roll_back(self, work: Work) -> set[int]:
        """Withdraws the blocks that failed work had offered for sharing, and returns them."""
        request = work.request
        spoiled = set(request.blocks[work.published : request.published])
        for block in spoiled:
            self.pool.forget(block)
        request.published = work.published
        return spoiled

    def replayed(self, work: Work) -> list[Work]:
        """The request's tokens before `work` again, in steps that sample nothing."""
        size = self.max_tokens_per_step
        starts = range(0, work.start, size)
        return [
            Work(work.request, start, min(size, work.start - start), False, work.published)
            for start in starts
        ]

    def abandon(self, works: list[Work]) -> None:
        """Undoes a planned step that was not computed: its requests start over, from the cache."""
        for work in reversed(works):
            self.roll_back(work)
            if work.request.blocks:
                self.preempt(work.request)

    def _budget(self) -> int:
        """Tokens of the next step: where steps are padded, a size that is at least 3/4 full.

        The rest goes into the next step, which costs less than computing as much padding.
        """
        if not self._sizes:
            return self.max_tokens_per_step
        starting = islice(self.waiting, self.max_batch - len(self.running))
        wanted = sum(request.pending for request in (*self.running, *starting))
        fitting = [size for size in self._sizes if 3 * size <= 4 * wanted]
        return max(fitting, default=self._sizes[0])

    def _work(self, request: Request, count: int) -> Work:
        """Plans `count` tokens and offers the blocks that they fill for sharing.

        Offered before they are computed: in every layer a step stores all keys and values before
        any is read, so requests of one step can share.
        """
        before, end = request.published, request.computed + count
        full = end // self.pool.block_size
        if full > before:
            keys = self._keys(request, full)
            for index in range(before, full):
                self.pool.publish(request.blocks[index], keys[index])
            request.published = full
        return Work(request, request.computed, count, end == len(request.tokens), before)

    def _grow(self, request: Request) -> bool:
        """Makes room for the request's last token; False when it had to give way itself."""
        if len(request.tokens) <= len(request.blocks) * self.pool.block_size:
            return True
        while not self.pool.available:
            newest = self.running[-1]
            self.preempt(newest)
            if newest is request:
                return False
        request.blocks += self.pool.allocate(1, after=request.blocks[-1])
        return True

    def _admit(self, request: Request) -> bool:
        """Gives a queued request blocks for all its tokens, if there are enough."""
        pool, size = self.pool, self.pool.block_size
        last = len(request.tokens) - 1  # the last token is always computed, to be sampled from
        keys = self._keys(request, last // size)[: last // size] if pool.sharing else []
        shared = pool.lookup(keys)
        parent, start = (keys[len(shared) - 1] if shared else ROOT), len(shared) * size
        tail = pool.find_tail(parent, request.tokens[start : min(start + size, last)])
        need = pool.blocks_for(len(request.tokens)) - len(shared)
        # Each running request may soon need a block: without this margin, preempted work thrashes.
        if need + pool.idle(shared) + len(self.running) > pool.available and self.running:
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.state_slot = self._state_slots.pop()
        pool.share(shared)
        request.blocks = shared + ([pool.claim_tail(parent)] if tail else [])
        room = pool.blocks_for(request.limit - 1) - len(request.blocks)
        after = request.blocks[-1] if request.blocks else -1
        request.blocks += pool.allocate(need - bool(tail), after=after, room=room)
        request.computed, request.published = start + tail, len(shared)
        request.reused += max(0, min(request.computed, request.prompt_tokens) - request.highest)
        request.highest = max(request.highest, request.computed)
        return True

    def _free(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._state_slots.append(request.state_slot)
        request.blocks, request.computed, request.published = [], 0, 0
        request.state_slot = -1

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """The request's chain of block keys, `count` or more of them."""
        keys, size = request.keys, self.pool.block_size
        while len(keys) < count:
            parent = keys[-1] if keys else ROOT
            keys.append(
                block_key(parent, request.tokens[len(keys) * size : (len(keys) + 1) * size])
            )
        return keys
