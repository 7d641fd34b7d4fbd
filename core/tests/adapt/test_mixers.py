"""Recurrent mixers: their functions become ours, and everything around them goes on working."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

import polysilicon
from polysilicon.adapt import tiny
from polysilicon.adapt.coverage_probes import token_ids
from polysilicon.adapt.standins import stand_in_for
from polysilicon.adapt.standins_convolution import ConvolvePrompt, ConvolveStep
from polysilicon.adapt.standins_delta import CorrectPrompt, CorrectStep
from polysilicon.adapt.standins_scan import ScanPrompt, ScanStep, SelectivePrompt, SelectiveStep
from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import AdaptError

#: A scan alone, beside attention in each layer, in turn with it; a convolution; a delta rule;
#: a scan by channel, a delta rule that decays by channel.
MODELS = ("mamba2", "falcon_h1", "bamba", "lfm2", "qwen3_next", "jamba", "kimi_linear")
LENGTHS = (1, 63, 64, 65, 257)


def build(name: str) -> Any:
    return tiny.tiny_model(tiny.tiny_config(name), dtype=torch.float32)


def generated(model: Any, **settings: Any) -> torch.Tensor:
    ids = token_ids(model, 2)[:, :17]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    asked = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens: torch.Tensor = model.generate(ids, attention_mask=mask, **asked | settings)
    return tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_gives_the_same_tokens(name: str, settings: dict[str, Any]) -> None:
    model = build(name)
    before = generated(model, **settings)
    polysilicon.adapt(model)
    assert torch.equal(generated(model, **settings), before)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_two_pieces_carries_its_states_through_the_cache(name: str) -> None:
    model = build(name)
    ids = token_ids(model, 2)

    def pieces() -> torch.Tensor:
        with torch.no_grad():
            first = model(input_ids=ids[:, :11], use_cache=True)
            key = next(key for key in ("cache", "past_key_values") if key in first)
            rest = model(input_ids=ids[:, 11:], use_cache=True, **{key: first[key]})
        return torch.cat([first.logits, rest.logits], dim=1)

    before = pieces()
    polysilicon.adapt(model)
    assert (pieces() - before).abs().max() <= 1e-4 * before.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_copies_casts_and_state_dicts(name: str) -> None:
    model = build(name)
    keys = list(model.state_dict())
    ids = token_ids(model, 1)
    adapted = polysilicon.adapt(model)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        twin = copy.deepcopy(model)
        assert torch.equal(twin(input_ids=ids).logits, expected)
        shorter = twin.to(torch.bfloat16)(input_ids=ids).logits
        # On average: a router may choose otherwise for a token.
        assert (shorter - expected).abs().mean() <= 0.05 * expected.abs().mean()
        adapted.undo()
        assert (model(input_ids=ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_bfloat16_is_replaced_too(name: str) -> None:
    model = tiny.tiny_model(tiny.tiny_config(name), dtype=torch.bfloat16)
    report = polysilicon.adapt(model).report
    assert not [row for row in report.kept if row.kind == "mixer"]
    assert [row for row in report.rows if row.kind == "mixer"]


def test_a_hybrid_compiles_in_the_engine_and_gives_the_same_tokens() -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    model = build("lfm2")
    prompts = [
        row[:length].tolist() for row, length in zip(token_ids(model, 2), (5, 12), strict=True)
    ]
    adapted = polysilicon.adapt(model)
    options: dict[str, Any] = {"max_batch": 2, "num_blocks": 16, "max_tokens_per_step": 16}
    plain = Engine(adapted, compile=False, **options).generate(prompts, params)
    engine = Engine(adapted, compile=True, **options)
    compiled = engine.generate(prompts, params)
    assert [one.token_ids for one in compiled] == [one.token_ids for one in plain]
    assert engine.report().compiled_while_serving == ()


def test_a_function_that_computes_something_else_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = modeling_mamba2.mamba2_chunk_scan

    def other(
        hidden_states: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        chunk_size: int,
        D: Any = None,
        dt_bias: Any = None,
        initial_states: Any = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        given = (initial_states, dt_softplus, dt_limit, return_final_states)
        return theirs(hidden_states, dt, 0.97 * A, B, C, chunk_size, D, dt_bias, *given)

    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", other)
    model = build("mamba2")
    with torch.no_grad():
        before = model(input_ids=token_ids(model, 1)).logits
        report = polysilicon.adapt(model).report
        after = model(input_ids=token_ids(model, 1)).logits
    kept = {row.path.rpartition(".")[2]: row.reason for row in report.kept}
    assert "mamba2_chunk_scan: results differ" in kept["mixer"]
    assert kept["conv1d"] == "its weights are the mixer's, which was kept"
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert report.paged is not None


def test_rows_of_several_sequences_are_refused() -> None:
    given = {"weight": normal(6, 4), "bias": None, "activation": None}
    ours = ConvolvePrompt.build(given, torch.float32, "", None)
    with pytest.raises(AdaptError, match=r"given 'seq_idx'.*a row of its own"):
        ours(normal(1, 6, 8), given["weight"], seq_idx=torch.zeros(1, 8, dtype=torch.int32))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("length", LENGTHS)
def test_convolutions_are_transformers_own(length: int) -> None:
    theirs = (modeling_mamba2.causal_conv1d_fn, modeling_mamba2.causal_conv1d_update)
    assert [stand_in_for(function) for function in theirs] == [ConvolvePrompt, ConvolveStep]
    given = {"weight": normal(6, 4), "bias": normal(6), "activation": "silu"}
    prompt, step = (
        kind.build(given, torch.float32, "", None) for kind in (ConvolvePrompt, ConvolveStep)
    )
    x = normal(2, 6, length)
    torch.testing.assert_close(prompt(x, **given), theirs[0](x, **given), rtol=1e-5, atol=1e-6)
    states = [normal(2, 6, 4), normal(2, 6, 4)]
    results = [run(x, state, **given) for run, state in zip((step, theirs[1]), states, strict=True)]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(*states)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("carried", [False, True])
def test_scans_are_transformers_own(length: int, carried: bool) -> None:
    theirs = modeling_mamba2.mamba2_chunk_scan
    assert stand_in_for(theirs) is ScanPrompt
    assert stand_in_for(modeling_mamba2.mamba2_selective_state_update) is ScanStep
    given: dict[str, Any] = {
        "hidden_states": normal(2, length, 4, 8),
        "dt": normal(2, length, 4),
        "A": -normal(4).abs(),
        "B": normal(2, length, 2, 16),
        "C": normal(2, length, 2, 16),
        "chunk_size": 32,
        "D": normal(4),
        "dt_bias": normal(4),
        "initial_states": normal(2, 4, 8, 16) if carried else None,
        "dt_softplus": True,
        "dt_limit": (0.01, 2.0),
        "return_final_states": True,
    }
    ours = ScanPrompt.build(given, torch.float32, "", None)
    torch.testing.assert_close(ours(**given), theirs(**given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_selective_scans_are_transformers_own(length: int) -> None:
    theirs = (modeling_jamba.mamba_selective_scan, modeling_jamba.mamba_selective_state_update)
    assert stand_in_for(theirs[0]) is SelectivePrompt
    shared: dict[str, Any] = {"A": -normal(6, 8).abs(), "D": normal(6)}
    names = ("hidden_states", "dt", "z")
    given = {name: normal(2, 6, length + n)[..., :length] for n, name in enumerate(names)}
    given |= {"B": normal(2, 8, length), "C": normal(2, 8, length + 1)[..., :length], **shared}
    told: dict[str, Any] = {"delta_bias": normal(6), "delta_softplus": True}
    told["return_last_state"] = True
    ours = SelectivePrompt.build(given | told, torch.float32, "", None)
    expected = theirs[0](**given, **told)
    torch.testing.assert_close(ours(**given, **told), expected, rtol=1e-4, atol=1e-5)
    states = [expected[1].clone(), expected[1].clone()]
    one = {name: x if name in shared else x[..., 0] for name, x in given.items()}
    one |= {"dt_bias": normal(6), "dt_softplus": True}
    step = ScanStep.build(one, torch.float32, "", None)
    assert isinstance(step, SelectiveStep)
    results = [run(state=s, **one) for run, s in zip((step, theirs[1]), states, strict=True)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rules_are_transformers_own(length: int, carried: bool, by_channel: bool) -> None:
    if by_channel:
        prompt = modeling_kimi_linear.chunk_kimi_delta_attention
        step = modeling_kimi_linear.recurrent_kimi_delta_attention
    else:
        prompt = modeling_qwen3_next.torch_chunk_gated_delta_rule
        step = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    assert [stand_in_for(function) for function in (prompt, step)] == [CorrectPrompt, CorrectStep]
    keys = 4 if by_channel else 2  # Kimi's keys have as many heads as its values
    given: dict[str, Any] = {
        "query": normal(2, length, keys, 8),
        "key": normal(2, length, keys, 8) * 2,
        "value": normal(2, length, 4, 16),
        "g": -normal(2, length, 4, *([8] if by_channel else [])).abs(),
        "beta": normal(2, length, 4).sigmoid(),
        "initial_state": normal(2, 4, 8, 16) if carried else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    for kind, theirs in ((CorrectPrompt, prompt), (CorrectStep, step)):
        ours = kind.build(given, torch.float32, "", None)
        torch.testing.assert_close(ours(**given), theirs(**given), rtol=1e-4, atol=1e-5)
