"""The models that must be whole: all replaced, one graph, and the same tokens in the engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import polysilicon
from polysilicon.adapt import tiny
from polysilicon.adapt.coverage_probes import forward_logits, token_ids
from polysilicon.engine import Engine, SamplingParams

#: Model → the ops besides those of a dense model that must serve it.
MODELS: dict[str, set[str]] = {
    "bamba": {"causal_conv1d", "ssd"},
    "deepseek_v3": {"moe_router", "experts"},
    "falcon_h1": {"causal_conv1d", "ssd"},
    "gemma4_text": {"rms_norm"},
    "gpt_oss": {"moe_router", "experts"},
    "granitemoehybrid": {"causal_conv1d", "ssd", "moe_router", "experts"},
    "lfm2": {"causal_conv1d"},
    "mamba2": {"causal_conv1d", "ssd"},
    "mixtral": {"moe_router", "experts"},
    "olmoe": {"moe_router", "experts"},
    "qwen3_moe": {"moe_router", "experts"},
    "qwen3_next": {"causal_conv1d", "gated_delta_rule", "moe_router", "experts"},
}
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> Any:
    return tiny.tiny_model(tiny.tiny_config(name), dtype=torch.float32)


def test_every_module_is_replaced_and_the_logits_stay(name: str, model: Any) -> None:
    with torch.no_grad():
        before = forward_logits(model, input_ids=token_ids(model, 3))
        keys = set(model.state_dict())
        adapted = polysilicon.adapt(model)
        after = forward_logits(model, input_ids=token_ids(model, 3))
    assert not adapted.report.kept
    assert adapted.report.paged is None
    ops = {op for row in adapted.report.rows for op in row.op.split(", ")}
    assert MODELS[name] <= ops
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert set(model.state_dict()) == keys
    adapted.undo()
    with torch.no_grad():
        assert torch.equal(forward_logits(model, input_ids=token_ids(model, 3)), before)


def test_the_forward_is_one_graph(model: Any) -> None:
    polysilicon.adapt(model)
    ids = token_ids(model, 1)[:, :12]
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch._dynamo.explain(lambda ids: model(input_ids=ids, use_cache=False).logits)(ids)
    assert (found.graph_break_count, found.graph_count) == (0, 1), found.break_reasons


def test_the_engine_gives_transformers_own_greedy_tokens(model: Any) -> None:
    """In chunks, with fewer places than requests and too few blocks, so that some are preempted."""
    twin = copy.deepcopy(model)
    rows = zip(token_ids(model, 5), (5, 13, 20, 27, 1), strict=True)
    prompts = [row[:length].tolist() for row, length in rows]
    engine = Engine(model, max_batch=3, block_size=4, num_blocks=16, max_tokens_per_step=11)
    for prompt, output in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = twin(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Transformers' own best at every step, unless two are closer than rounding.
        assert (logits.amax(-1) - chosen).max() < 1e-4
