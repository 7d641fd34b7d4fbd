"""Routers and experts: replaced, equal, and what stays; test_targets.py runs them in the engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import polysilicon
from polysilicon.adapt import tiny
from polysilicon.adapt.coverage_probes import forward_logits, token_ids
from polysilicon.errors import AdaptError

#: Softmax before and after the choice, sigmoid with correction and groups, biases, interleaved and
#: clamped gates, transposed stacks, shared experts, latent attention.
MODELS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "olmoe")


def build(name: str) -> Any:
    return tiny.tiny_model(tiny.tiny_config(name), dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_routers_and_experts_are_replaced_and_the_logits_stay(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        before = forward_logits(model, input_ids=token_ids(model, 3))
        keys = set(model.state_dict())
        adapted = polysilicon.adapt(model)
        after = forward_logits(model, input_ids=token_ids(model, 3))
    assert not [row for row in adapted.report.rows if row.status == "kept"]
    ops = {row.op for row in adapted.report.rows if row.kind == "experts"}
    assert ops == {"linear, moe_router", "experts"}
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert set(model.state_dict()) == keys
    adapted.undo()
    with torch.no_grad():
        assert torch.equal(forward_logits(model, input_ids=token_ids(model, 3)), before)


def test_a_deep_copy_and_a_cast_go_on_working() -> None:
    model = build("gpt_oss")
    polysilicon.adapt(model)
    ids = token_ids(model, 1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(copy.deepcopy(model)(input_ids=ids, use_cache=False).logits, expected)
        shorter = model.to(torch.bfloat16)(input_ids=ids, use_cache=False).logits
    assert (shorter.dtype, bool(shorter.isfinite().all())) == (torch.bfloat16, True)


def as_initialised(name: str) -> Any:
    """With Transformers' own first weights: small ones, corrections and biases of zero."""
    torch.manual_seed(0)
    config = tiny.tiny_config(name)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_a_clamp_that_usual_inputs_never_reach_is_kept() -> None:
    model = as_initialised("gpt_oss")
    path = next(p for p, m in model.named_modules() if "experts" in vars(m).get("_modules", {}))
    theirs = model.get_submodule(path).experts
    polysilicon.adapt(model)
    ours = model.get_submodule(path).experts
    x = torch.randn(6, ours.gate_up_proj.shape[1]) * 1000
    indices, weights = torch.tensor([[0, 1], [2, 3]] * 3), torch.rand(6, 2)
    with torch.no_grad():
        expected = theirs(x, indices, weights)
        assert (ours(x, indices, weights) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (type(ours) is type(theirs), ours.limit) == (False, theirs.limit)


# In the router itself, and in a child of it.
@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe"])
def test_a_correction_that_was_zero_when_adapted_keeps_its_role(name: str) -> None:
    model = as_initialised(name)
    twin = copy.deepcopy(model)
    polysilicon.adapt(model)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in twin.state_dict().items())
    corrections = [key for key in loaded if "correction" in key]
    assert corrections
    for key in corrections:
        loaded[key] = torch.randn(loaded[key].shape)
    model.load_state_dict(loaded)
    twin.load_state_dict(loaded)
    with torch.no_grad():
        expected = forward_logits(twin, input_ids=token_ids(twin, 2))
        after = forward_logits(model, input_ids=token_ids(model, 2))
    assert (after - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_call_that_asks_for_router_logits_is_refused_until_undo() -> None:
    model = build("mixtral")
    adapted = polysilicon.adapt(model)
    ids = token_ids(model, 1)
    with torch.no_grad(), pytest.raises(AdaptError, match="output_router_logits"):
        model(input_ids=ids, output_router_logits=True)
    model.config.output_router_logits = True
    with torch.no_grad(), pytest.raises(AdaptError, match="output_router_logits"):
        model(input_ids=ids)
    adapted.undo()
    with torch.no_grad():
        assert len(model(input_ids=ids).router_logits) == model.config.num_hidden_layers


def test_what_routes_otherwise_stays_with_the_reason() -> None:
    report = polysilicon.adapt(build("phimoe")).report
    kept = [row for row in report.kept if row.kind == "experts"]
    assert kept
    assert all("results differ" in row.reason for row in kept)
    assert set(kept) <= set(report.missing)


def test_a_config_that_asks_for_router_logits_is_refused() -> None:
    model = build("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(AdaptError, match="output_router_logits"):
        polysilicon.adapt(model)
