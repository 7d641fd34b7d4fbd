"""Greedy tokens of tiny random models equal those of Transformers' generate in every batching."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, GREEDY, Case
from transformers import AutoModelForCausalLM, RwkvConfig

from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import AdaptError, DeviceError, KernelError


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module")
def llama() -> Case:
    return Case("llama")


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 1},
        {"max_batch": 8},
        {"max_batch": 8, "max_tokens_per_step": 9},
        {"max_batch": 8, "num_blocks": 7},
        {"max_batch": 8, "block_size": 5, "num_blocks": 100, "prefix_sharing": False},
    ],
    ids=["one_at_a_time", "batched", "chunked", "preempted", "unaligned_blocks"],
)
def test_tokens_equal_generate(case: Case, options: dict[str, Any]) -> None:
    engine = case.engine(**options)
    outputs = engine.generate(case.prompts, GREEDY)
    assert [output.token_ids for output in outputs] == case.expected
    assert (engine.report().preemptions > 0) == (options.get("num_blocks") == 7)
    assert engine.pool.in_use == 0


def test_tokens_are_the_same_with_a_shared_prefix(case: Case) -> None:
    engine = case.engine()
    first = engine.generate(case.prompts, GREEDY)
    again = engine.generate(case.prompts, GREEDY)
    assert [output.token_ids for output in first + again] == case.expected * 2
    # Whole blocks are shared, and the last token is computed again, to be sampled from.
    shared = [(len(prompt) - 1) // 16 * 16 for prompt in case.prompts]
    assert [output.reused_tokens for output in again] == shared


def test_a_second_turn_computes_only_what_is_new(case: Case) -> None:
    engine = case.engine()
    (first,) = engine.generate([case.prompts[4]], GREEDY)
    turn = [*case.prompts[4], *first.token_ids, 3, 1, 4]
    (second,) = engine.generate([turn], GREEDY)
    # The last token of the first turn was never computed, and three are new.
    assert second.prefilled_tokens == 4
    (alone,) = case.engine(prefix_sharing=False).generate([turn], GREEDY)
    assert second.token_ids == alone.token_ids


def test_random_requests_equal_their_solo_runs(llama: Case) -> None:
    rng = random.Random(3)
    prompts = [
        [rng.randrange(4) for _ in range(rng.randint(1, 40))] for _ in range(200)
    ]  # few ids, so that prefixes repeat
    lengths = [rng.randint(1, 16) for _ in prompts]
    params = [SamplingParams(max_new_tokens=length) for length in lengths]
    engine = llama.engine(num_blocks=20)
    numbers = [engine.add_request(p, one) for p, one in zip(prompts, params, strict=True)]
    finished: dict[int, tuple[int, ...]] = {}
    while engine.has_work():
        live = [n for n in numbers if n not in finished]
        if rng.random() < 0.15 and live:
            finished[gone] = engine.cancel(gone := rng.choice(live)).token_ids
        for update in engine.step():
            if update.output is not None:
                finished[update.request_id] = update.output.token_ids
    assert engine.pool.in_use == 0
    alone = llama.engine(max_batch=1, prefix_sharing=False).generate(prompts, params)
    complete = [n for n in numbers if len(finished[n]) == lengths[n]]
    assert 50 < len(complete) < 200
    for number in numbers:  # what a cancelled one had is the beginning of its solo run
        got = finished[number]
        assert got == alone[number].token_ids[: len(got)]


def test_a_kernel_that_raises_is_named_and_fails_only_its_request(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llama.engine()
    layer = llama.adapted.attention[1]
    kernel = layer.paged_attention
    failing = len(llama.prompts[3])

    def raises_for_one_length(*args: Any, **kwargs: Any) -> Any:
        if failing in args[5].tolist():
            # Blocks that do not exist.
            return kernel(*args[:3], args[3] + 10**6, *args[4:], **kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(layer, "paged_attention", raises_for_one_length)
    others = [p for i, p in enumerate(llama.prompts) if i in (1, 4, 6)]
    one = SamplingParams(max_new_tokens=1)
    outputs = engine.generate([others[0], llama.prompts[3], *others[1:]], one)
    error = outputs[1].error
    assert isinstance(error, KernelError)
    assert "kernel paged_attention.torch" in str(error)
    assert "POLYSILICON_DISABLE_KERNELS=paged_attention.torch" in str(error)
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == [
        llama.expected[i][:1] for i in (1, 4, 6)
    ]
    monkeypatch.undo()
    (output,) = engine.generate([llama.prompts[3]], GREEDY)
    assert output.token_ids == llama.expected[3]


def test_another_engine_on_the_same_model_is_told(llama: Case) -> None:
    first = llama.engine()
    llama.engine()
    (output,) = first.generate([[1, 2]], GREEDY)
    assert isinstance(output.error, AdaptError)
    assert "use one engine a model" in str(output.error)


def test_a_cache_that_does_not_fit_says_how_much_is_free(llama: Case) -> None:
    with pytest.raises(DeviceError, match=r"GB free and the KV cache needs .* fewer num_blocks"):
        llama.engine(num_blocks=10**9)


def test_a_model_without_paged_attention_is_refused_and_left_as_it_was() -> None:
    config = RwkvConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(AdaptError, match=r"cannot run RwkvForCausalLM: .* still works"):
        Engine(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_dtype_that_does_not_exist_is_named(llama: Case) -> None:
    with pytest.raises(ValueError, match="dtype 'float99' is not one to run in: one of float32"):
        Engine(llama.model, dtype="float99")
    with pytest.raises(ValueError, match=r"adapted in torch.float32 and torch.bfloat16 was asked"):
        llama.engine(dtype="bfloat16")


def test_a_model_can_be_run_in_another_dtype() -> None:
    case = Case("llama")
    case.adapted.undo()
    engine = Engine(case.model, dtype="bfloat16", compile=False, num_blocks=8)
    (output,) = engine.generate([[1, 2, 3]], GREEDY)
    assert (len(output.token_ids), case.model.dtype) == (24, torch.bfloat16)


def test_a_paged_forward_that_differs_is_refused(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.adapted.attention[0], "scale", 0.9)
    forward = llama.adapted.attention[0]._paged
    monkeypatch.setattr(llama.adapted.attention[0], "_paged", lambda *args: forward(*args).mul(1.5))
    with pytest.raises(AdaptError, match="gives other logits with the paged cache than without"):
        llama.engine()


def test_the_report_lists_the_ops_that_the_engine_runs_and_no_other(llama: Case) -> None:
    ops = {row.op for row in llama.engine().report().ops}
    assert {"kv_store", "paged_attention", "rms_norm", "silu_and_mul", "sampling"} <= ops
    # Bound for generate(), which keeps its own cache; the engine has no use for it.
    assert "attention" not in ops
