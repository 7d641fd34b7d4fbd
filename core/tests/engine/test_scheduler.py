"""What each step computes, over a fake model that reads back what the cache holds."""

from __future__ import annotations

import random

import pytest
import torch
from fake_model import FakeForward, continued
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polysilicon.engine.pool import BlockPool
from polysilicon.engine.request import Request, SamplingParams
from polysilicon.engine.runner import Buckets, Runner
from polysilicon.engine.scheduler import Scheduler, Work
from polysilicon.errors import RequestError


class Loop:
    """Scheduler, runner and fake model: an engine without sampling and text."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch: int = 4,
        max_tokens: int = 8,
        sharing: bool = True,
        padded: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, sharing=sharing)
        buckets = Buckets((), max_batch=max_batch, max_tokens=max_tokens) if padded else None
        self.scheduler = Scheduler(
            self.pool,
            max_batch=max_batch,
            max_tokens_per_step=max_tokens,
            sizes=buckets.mixed_sizes if buckets else (),
        )
        self.forward = FakeForward(num_blocks, block_size)
        self.runner = Runner(
            self.forward,
            torch.device("cpu"),
            max_batch=max_batch,
            max_tokens=max_tokens,
            block_size=block_size,
            max_blocks=num_blocks,
            buckets=buckets,
        )
        self.requests: list[Request] = []

    def add(self, prompt: list[int], new: int) -> Request:
        request = Request(
            id=len(self.requests),
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            params=SamplingParams(max_new_tokens=new),
            limit=len(prompt) + new,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> list[Work]:
        works = self.scheduler.plan()
        if not works:
            return works
        logits = self.runner.run(works)
        tokens = iter(logits.argmax(-1).tolist())
        for work in works:
            self.scheduler.done(work)
        for work in works:
            if work.samples:
                work.request.tokens.append(next(tokens))
                if len(work.request.tokens) == work.request.limit:
                    self.scheduler.finish(work.request)
                    work.request.finish_reason = "length"
        self.pool.check()
        return works

    def run(self) -> None:
        while self.step():
            pass

    def answer(self, request: Request) -> tuple[int, ...]:
        return tuple(request.tokens[request.prompt_tokens :])


def expected(request: Request) -> tuple[int, ...]:
    made = len(request.tokens) - request.prompt_tokens
    return continued(request.tokens[: request.prompt_tokens], made)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_answers_do_not_depend_on_batching(padded: bool, sharing: bool, num_blocks: int) -> None:
    loop = Loop(num_blocks=num_blocks, sharing=sharing, padded=padded)
    rng = random.Random(3)
    for _ in range(12):
        loop.add([rng.randrange(3) for _ in range(rng.randint(1, 20))], rng.randint(1, 12))
    loop.run()
    assert [loop.answer(r) for r in loop.requests] == [expected(r) for r in loop.requests]
    assert all(r.finish_reason == "length" for r in loop.requests)
    assert loop.pool.in_use == 0


def test_a_small_pool_preempts_the_newest_and_loses_nothing() -> None:
    loop = Loop(num_blocks=6, max_batch=3, sharing=False)
    requests = [loop.add([index] * 4, 12) for index in range(3)]
    loop.run()
    assert loop.scheduler.preemptions > 0
    assert requests[0].preemptions == 0
    assert [loop.answer(r) for r in requests] == [continued([i] * 4, 12) for i in range(3)]


def test_decode_goes_first_and_a_long_prompt_is_chunked() -> None:
    loop = Loop(max_tokens=8)
    short = loop.add([1, 2], 9)
    loop.step()
    long = loop.add(list(range(20)), 2)
    counts = []
    while long.pending > 1:
        counts.append([(work.request.id, work.count) for work in loop.step()])
    assert counts == [[(short.id, 1), (long.id, 7)]] * 2 + [[(short.id, 1), (long.id, 6)]]


def test_padded_steps_are_at_least_three_quarters_full() -> None:
    loop = Loop(max_tokens=256, num_blocks=256, padded=True)
    loop.add([1, 2] * 100, 2)
    loop.add([3] * 9, 2)
    loop.run()
    # 209 tokens fit 256 well; what is left after that are two decode steps.
    assert loop.forward.calls == [256, 4]
    loop.add([4] * 150, 1)
    loop.run()
    assert loop.forward.calls[2:] == [64, 64, 64]


def test_the_batch_limit_holds() -> None:
    loop = Loop(max_batch=2)
    for _ in range(5):
        loop.add([1, 2, 3], 6)
    while works := loop.step():
        assert len(works) <= 2


def test_a_second_turn_computes_only_the_new_tokens() -> None:
    loop = Loop(max_tokens=64)
    first = loop.add(list(range(10)), 7)
    loop.run()
    history = list(first.tokens)
    second = loop.add([*history, 40, 41, 42], 3)
    loop.run()
    # The last token of the first turn was sampled but never computed.
    assert second.reused == len(history) - 1
    assert second.prefilled == 1 + 3
    assert loop.answer(second) == expected(second)


def test_requests_of_one_step_share_their_prefix() -> None:
    loop = Loop(max_tokens=64)
    prompt = list(range(12))
    requests = [loop.add([*prompt, index], 3) for index in range(3)]
    loop.step()
    assert [r.reused for r in requests] == [0, 12, 12]
    loop.run()
    assert [loop.answer(r) for r in requests] == [expected(r) for r in requests]


def test_a_request_larger_than_the_pool_is_refused() -> None:
    loop = Loop(num_blocks=1)
    with pytest.raises(RequestError, match="fill 3 blocks of 4, and the KV cache has 1: raise"):
        loop.add([1] * 5, 5)
    assert not loop.scheduler.waiting
    fits = loop.add([1, 2], 3)
    loop.run()
    assert loop.answer(fits) == continued([1, 2], 3)


def test_an_abandoned_step_is_computed_again() -> None:
    loop = Loop(max_tokens=64)
    prompt = list(range(9))
    requests = [loop.add([*prompt, index], 5) for index in range(3)]
    loop.scheduler.abandon(loop.scheduler.plan())
    loop.pool.check()
    assert loop.pool.in_use == 0
    loop.run()
    assert [loop.answer(r) for r in requests] == [expected(r) for r in requests]


@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (4, 3)])
def test_impossible_limits_are_refused(batch: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        Scheduler(BlockPool(4, 4), max_batch=batch, max_tokens_per_step=tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run and are cancelled at random, over a pool that is too small for them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop(num_blocks=7, block_size=2, max_batch=3, max_tokens=5)
        self.live: list[Request] = []

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=7), new=st.integers(1, 6))
    def add(self, prompt: list[int], new: int) -> None:
        self.live.append(self.loop.add(prompt, new))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()
        self.live = [request for request in self.live if request.finish_reason is None]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.loop.scheduler.finish(self.live.pop(which % len(self.live)))

    @rule()
    def interrupt(self) -> None:
        self.loop.scheduler.abandon(self.loop.scheduler.plan())

    @invariant()
    def answers_are_right(self) -> None:
        self.loop.pool.check()
        for request in self.loop.requests:
            assert self.loop.answer(request) == expected(request)

    @invariant()
    def arrival_order_is_kept(self) -> None:
        for queue in (self.loop.scheduler.running, list(self.loop.scheduler.waiting)):
            assert [r.id for r in queue] == sorted(r.id for r in queue)

    def teardown(self) -> None:
        self.loop.run()
        self.loop.pool.check()
        assert self.loop.pool.in_use == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
