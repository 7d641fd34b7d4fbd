"""Recurrent states in the engine: one row a running request, whatever happens to it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_model import VOCABULARY, FakeModel, FakeRecurrence, continued

from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import KernelError

GREEDY = SamplingParams(max_new_tokens=9)


def stateful(**options: Any) -> tuple[Engine, FakeRecurrence]:
    settings = {"max_batch": 3, "max_tokens_per_step": 8, "compile": False} | options
    model = FakeModel(states=settings["max_batch"], num_blocks=settings.pop("num_blocks", 64))
    assert isinstance(model.forward, FakeRecurrence)
    return Engine(model, **settings), model.forward


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(3)
    lengths = (rng.randint(1, longest) for _ in range(count))
    return [[rng.randrange(40) for _ in range(length)] for length in lengths]


def check(engine: Engine, asked: list[list[int]]) -> None:
    outputs = engine.generate(asked, GREEDY)
    assert [o.token_ids for o in outputs] == [continued(prompt, 9) for prompt in asked]


def test_rows_are_handed_on_and_chunks_carry_the_state() -> None:
    engine, forward = stateful()
    check(engine, prompts(20))
    check(engine, prompts(7))
    assert max(forward.calls) == 8


def test_a_preempted_request_begins_from_nothing() -> None:
    engine, _ = stateful(num_blocks=13)
    check(engine, prompts(12, longest=35))
    assert engine.report().preemptions > 0
    assert engine.report().recomputed_tokens > 0


def test_equal_beginnings_are_computed_by_each_and_the_report_tells() -> None:
    engine, _ = stateful()
    check(engine, [[1] * 17, [1] * 17, [1] * 17 + [2]])
    report = engine.report()
    assert report.reused_tokens == 0
    assert not report.prefix_sharing
    with pytest.raises(ValueError, match=r"recurrent states.*leave prefix_sharing out"):
        stateful(prefix_sharing=True)


def test_cancelling_frees_the_row() -> None:
    engine, _ = stateful(max_batch=2)
    for _ in range(5):
        ids = [engine.add_request([1, 2, 3], GREEDY) for _ in range(3)]
        engine.step()
        for request_id in ids:
            engine.cancel(request_id)
    check(engine, prompts(5))


def until(bad: int, answer: tuple[int, ...]) -> tuple[int, ...]:
    """The answer as far as it comes where the token `bad` can't be computed."""
    return answer[: answer.index(bad) + 1] if bad in answer else answer


@pytest.mark.parametrize("length", [2, 8, 21])
def test_a_failed_step_leaves_the_states_of_the_others_right(length: int) -> None:
    """Their states had moved on when the step failed: they are computed again from the start."""
    bad = 45
    engine, forward = stateful()
    forward.broken = {bad}
    asked = [[3] * length, [1, 2, bad], [4] * length]
    good, failed, other = engine.generate(asked, GREEDY)
    assert isinstance(failed.error, KernelError)
    assert good.token_ids == until(bad, continued(asked[0], 9))
    assert other.token_ids == until(bad, continued(asked[2], 9))
    forward.broken = set()
    check(engine, prompts(6))


def test_a_step_that_fails_in_the_middle_of_an_answer() -> None:
    engine, forward = stateful(max_batch=2)
    first = engine.add_request([5] * 19, SamplingParams(max_new_tokens=12))
    ended: dict[int, Any] = {}
    forward.broken = {VOCABULARY - 1}
    asked = next(p for p in prompts(50) if VOCABULARY - 1 in continued(p, 6)[1:5])
    second = engine.add_request(asked, SamplingParams(max_new_tokens=9))
    while engine.has_work():
        for update in engine.step():
            if update.output is not None:
                ended[update.request_id] = update.output
    assert isinstance(ended[second].error, KernelError)
    assert ended[first].token_ids == until(VOCABULARY - 1, continued([5] * 19, 12))


def test_an_interrupted_step_is_computed_again() -> None:
    engine, forward = stateful()
    asked = prompts(3)
    for prompt in asked:
        engine.add_request(prompt, GREEDY)
    engine.step()
    original = type(forward).__call__

    class Interrupted(FakeRecurrence):
        def __call__(self, *args: Any) -> Any:
            original(self, *args)
            raise KeyboardInterrupt

    forward.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    forward.__class__ = FakeRecurrence
    answers: dict[int, Any] = {}
    while engine.has_work():
        for update in engine.step():
            if update.output is not None:
                answers[update.request_id] = update.output.token_ids
    assert [answers[i] for i in range(3)] == [continued(prompt, 9) for prompt in asked]
