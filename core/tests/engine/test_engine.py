"""The engine over a fake model: requests come, stream, fail, are cancelled and end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fake_model import VOCABULARY, FakeModel, FakeTokenizer, continued

from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import KernelError, RequestError

GREEDY = SamplingParams(max_new_tokens=9)


def engine(model: FakeModel | None = None, **options: Any) -> Engine:
    settings = {"max_batch": 4, "max_tokens_per_step": 16, "compile": False} | options
    return Engine(model or FakeModel(), **settings)


def test_answers_come_in_the_order_of_the_prompts() -> None:
    prompts = [[1, 2, 3], [4], [5] * 30, [6, 7], [8], [9]]
    lengths = [5, 1, 7, 2, 9, 3]
    params = [SamplingParams(max_new_tokens=length) for length in lengths]
    outputs = engine().generate(prompts, params)
    expected = [continued(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"length"}


def test_a_stop_id_ends_a_request_and_is_its_last_token() -> None:
    answer = continued([1, 2], 9)
    params = SamplingParams(max_new_tokens=9, stop_ids=(answer[3],))
    (output,) = engine().generate([[1, 2]], params)
    assert output.token_ids == answer[: answer.index(answer[3]) + 1]
    assert output.finish_reason == "stop"


def test_the_models_own_stop_ids_can_be_ignored() -> None:
    model = FakeModel()
    model.stop_ids = frozenset({continued([1, 2], 1)[0]})
    running = engine(model)
    stops, goes_on = running.generate(
        [[1, 2], [1, 2]], [GREEDY, SamplingParams(max_new_tokens=9, ignore_eos=True)]
    )
    assert (len(stops.token_ids), len(goes_on.token_ids)) == (1, 9)


def test_the_context_ends_a_request() -> None:
    (output,) = engine(FakeModel(context=12)).generate([[1] * 10], GREEDY)
    assert (len(output.token_ids), output.finish_reason) == (2, "length")


def test_a_stream_is_the_text_of_the_tokens() -> None:
    running = engine(tokenizer=FakeTokenizer())
    updates = list(running.stream("abc", GREEDY))
    output = updates[-1].output
    assert output is not None
    assert "".join(update.text for update in updates) == output.text
    (whole,) = running.generate(["abc"], GREEDY)
    assert (whole.text, whole.token_ids) == (output.text, output.token_ids)


def test_a_stop_text_ends_a_request_and_is_not_in_its_text() -> None:
    running = engine(tokenizer=FakeTokenizer())
    (whole,) = running.generate(["abc"], GREEDY)
    stop = whole.text[3:5]
    (cut,) = running.generate(["abc"], SamplingParams(max_new_tokens=9, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_leaving_a_stream_early_frees_its_blocks() -> None:
    running = engine()
    stream = running.stream([1, 2, 3], GREEDY)
    next(stream)
    assert running.pool.in_use > 0
    stream.close()
    assert running.pool.in_use == 0
    assert not running.has_work()


def test_generate_keeps_the_updates_of_other_requests() -> None:
    running = engine()
    other = running.add_request([4, 5], SamplingParams(max_new_tokens=2))
    running.generate([[1, 2]], GREEDY)
    updates = running.step()
    assert [update.request_id for update in updates] == [other, other]
    assert updates[-1].output is not None
    assert updates[-1].output.token_ids == continued([4, 5], 2)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "empty"), ([1] * 200, "context holds 200"), ([VOCABULARY], "not an id"), ("abc", "text")],
)
def test_a_wrong_prompt_fails_alone(prompt: Any, said: str) -> None:
    running = engine()
    kept = running.add_request([1, 2], GREEDY)
    with pytest.raises(RequestError, match=said):
        running.add_request(prompt)
    with pytest.raises(RequestError, match="prompt 1: "):
        running.generate([[3], prompt])
    outputs = [update.output for _ in range(9) for update in running.step() if update.output]
    assert [(output.request_id, output.token_ids) for output in outputs] == [
        (kept, continued([1, 2], 9))
    ]
    assert running.pool.in_use == 0


def test_a_pool_of_one_block_says_what_to_do() -> None:
    running = engine(FakeModel(num_blocks=1))
    with pytest.raises(RequestError, match="raise num_blocks, or lower max_new_tokens"):
        running.add_request([1, 2], GREEDY)
    (output,) = running.generate([[1, 2]], SamplingParams(max_new_tokens=3))
    assert output.token_ids == continued([1, 2], 3)


def test_a_step_that_raises_fails_only_the_request_that_is_to_blame() -> None:
    model = FakeModel()
    prompts = [[1, 2, 3], [7, 8], [4, 5]]
    # Distinct from anything that the others compute.
    computed = {t for p in prompts for t in (*p, *continued(p, 9))}
    bad = next(token for token in range(VOCABULARY) if token not in computed)
    model.forward.broken = {bad}
    running = engine(model)
    outputs = running.generate([prompts[0], [bad, 1], *prompts[1:]], GREEDY)
    assert outputs[1].finish_reason == "error"
    assert isinstance(outputs[1].error, KernelError)
    assert "outside of any kernel" in str(outputs[1].error)
    good = [outputs[0], *outputs[2:]]
    assert [output.token_ids for output in good] == [continued(p, 9) for p in prompts]
    assert running.pool.in_use == 0


def test_blocks_that_a_failed_request_owed_are_not_reused() -> None:
    model = FakeModel(block_size=2)
    model.forward.broken = {40}
    running = engine(model)
    # The second request shares blocks that the first was to fill in the same step.
    outputs = running.generate(
        [[1, 2, 3, 4, 40], [1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=1)
    )
    assert outputs[0].finish_reason == "error"
    assert outputs[1].token_ids == continued([1, 2, 3, 4, 5], 1)
    running.pool.check()


def test_logits_that_are_nan_end_the_request_with_an_error() -> None:
    model = FakeModel()
    model.silent = {33}
    first, second = engine(model).generate([[1, 33], [1, 2]], SamplingParams(max_new_tokens=1))
    assert first.finish_reason == "error"
    assert "logits after token 2 are NaN" in str(first.error)
    assert second.token_ids == continued([1, 2], 1)


def test_an_interrupted_step_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    running = engine(model)
    running.add_request(list(range(12)), GREEDY)
    run = running._runner.run

    def interrupted(works: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(running._runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.step()
    monkeypatch.setattr(running._runner, "run", run)
    outputs = []
    while running.has_work():
        outputs += [update.output for update in running.step() if update.output]
    assert [output.token_ids for output in outputs] == [continued(list(range(12)), 9)]


def test_cancelling_what_has_ended_is_an_error() -> None:
    running = engine()
    request = running.add_request([1], GREEDY)
    assert running.cancel(request).finish_reason == "cancelled"
    with pytest.raises(KeyError, match="may have ended"):
        running.cancel(request)


def test_the_same_seed_gives_the_same_tokens_in_any_batch() -> None:
    params = SamplingParams(max_new_tokens=8, temperature=3.0, seed=5)
    alone = engine().generate([[1, 2]], params)[0]
    together = engine().generate([[3], [1, 2], [4]], [GREEDY, params, GREEDY])[1]
    other = engine().generate([[1, 2]], SamplingParams(max_new_tokens=8, temperature=3.0, seed=6))[
        0
    ]
    assert alone.token_ids == together.token_ids
    assert alone.token_ids != other.token_ids


def test_the_second_turn_is_counted_in_the_report() -> None:
    running = engine()
    first = running.generate([[1, 2, 3, 4, 5]], GREEDY)[0]
    second = running.generate([[1, 2, 3, 4, 5, *first.token_ids, 6, 7]], GREEDY)[0]
    assert (second.reused_tokens, second.prefilled_tokens) == (13, 3)
    report = running.report()
    assert (report.reused_tokens, report.prefilled_tokens) == (13, 8)
    assert report.tokens == 18


def test_200_requests_with_random_cancellations_leave_the_pool_empty() -> None:
    rng = random.Random(11)
    running = engine(FakeModel(num_blocks=20, block_size=4))
    wanted: dict[int, tuple[list[int], int]] = {}
    finished: dict[int, tuple[int, ...]] = {}
    cancelled: set[int] = set()
    while len(wanted) < 200 or running.has_work():
        for _ in range(rng.randrange(3)):
            if len(wanted) < 200:
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
                new = rng.randint(1, 30)
                number = running.add_request(prompt, SamplingParams(max_new_tokens=new))
                wanted[number] = (prompt, new)
        live = wanted.keys() - finished.keys() - cancelled
        if live and rng.random() < 0.1:
            number = rng.choice(sorted(live))
            running.cancel(number)
            cancelled.add(number)
        for update in running.step():
            if update.output is not None:
                finished[update.request_id] = update.output.token_ids
        running.pool.check()
    assert running.pool.in_use == 0
    assert running.report().preemptions > 0
    assert len(cancelled) > 10
    assert finished == {n: continued(*wanted[n]) for n in wanted if n not in cancelled}


@pytest.mark.parametrize("name", ["max_batch", "block_size", "num_blocks", "max_tokens_per_step"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: expected a whole number of at least 1"):
        engine(**{name: 0})


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [("abc", None, r"write \[prompt\]"), ([[1], [2]], [GREEDY], "2 prompts and 1 params")],
)
def test_generate_called_wrongly_says_how(prompts: Any, params: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        engine().generate(prompts, params)


def test_a_stream_that_is_dropped_before_its_first_update_is_cancelled() -> None:
    running = engine()
    stream = running.stream([1, 2, 3], GREEDY)
    del stream
    assert not running.has_work()


def test_a_text_in_place_of_a_model_says_to_load_it() -> None:
    with pytest.raises(TypeError, match=r"load it first, Engine\(load\('smollm2'\)\)"):
        Engine("smollm2")
