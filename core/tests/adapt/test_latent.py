"""Latent attention: expanded for Transformers' caches, latents alone in the engine's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import polysilicon
from polysilicon.adapt import tiny
from polysilicon.adapt.coverage_probes import forward_logits, token_ids
from polysilicon.engine import Engine, SamplingParams
from polysilicon.layers import LatentAttention

#: Rotation of halves, by complex numbers, of pairs; scaled latents and two attentions a layer.
MODELS = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
NEW = 8


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return tiny.tiny_model(tiny.tiny_config(name), dtype=dtype)


def numbers_of(model: Any) -> int:
    """What the paper says a token takes in one layer."""
    return int(model.config.kv_lora_rank + model.config.qk_rope_head_dim)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_the_latent_and_the_shared_key(name: str) -> None:
    model = build(name)
    adapted = polysilicon.adapt(model)
    assert adapted.report.paged is None
    assert adapted.attention
    for layer in adapted.attention:
        assert isinstance(layer, LatentAttention)
        assert layer.cache_bytes(1) == 4 * numbers_of(model)


# The one in a short dtype has no router, which would choose other experts at a rounding.
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [("deepseek_v3", torch.float32, 1e-4), ("youtu", torch.bfloat16, 0.05)],
)
def test_logits_keys_and_tokens_stay(name: str, dtype: torch.dtype, bound: float) -> None:
    model = build(name, dtype)
    ids = token_ids(model, 3)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        before, tokens = forward_logits(model, input_ids=ids), model.generate(ids, **options)
        keys = set(model.state_dict())
        adapted = polysilicon.adapt(model)
        after = forward_logits(model, input_ids=ids)
    assert all(isinstance(layer, LatentAttention) for layer in adapted.attention)
    assert (after - before).abs().max() <= bound * before.abs().max()
    assert set(model.state_dict()) == keys
    if dtype == torch.float32:
        assert torch.equal(model.generate(ids, **options), tokens)
    adapted.undo()
    with torch.no_grad():
        assert torch.equal(forward_logits(model, input_ids=ids), before)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_gives_transformers_own_greedy_tokens(name: str) -> None:
    """Prompts in chunks, and decoding beside them."""
    model = build(name)
    twin = copy.deepcopy(model)
    rows = zip(token_ids(model, 4), (5, 13, 20, 27), strict=True)
    prompts = [row[:length].tolist() for row, length in rows]
    engine = Engine(
        model, max_batch=3, block_size=4, num_blocks=64, max_tokens_per_step=5, compile=False
    )
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = twin(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert len(output.token_ids) == NEW
        chosen = logits.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Transformers' own best at every step, unless two are closer than rounding.
        assert (logits.amax(-1) - chosen).max() < 1e-4
    ops = {row.op for row in engine.report().ops}
    assert {"latent_store", "latent_attention"} <= ops
    assert not ops & {"kv_store", "paged_attention", "attention"}


def test_the_engine_runs_it_in_one_graph_a_shape() -> None:
    model = build("deepseek_v3")
    prompt = token_ids(model, 1)[0].tolist()
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 32}
    torch._dynamo.reset()
    (compiled,) = Engine(model, compile=True, **settings).generate([prompt], params)
    twin = build("deepseek_v3")
    (eager,) = Engine(twin, compile=False, **settings).generate([prompt], params)
    assert compiled.error is None
    assert compiled.token_ids == eager.token_ids


def test_a_deep_copy_attends_to_its_own_latents() -> None:
    model = build("deepseek_v3")
    polysilicon.adapt(model)
    twin = copy.deepcopy(model)
    ids = token_ids(model, 1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(input_ids=ids, use_cache=False).logits, expected)


def test_what_keeps_a_module_from_latents_is_listed() -> None:
    config = tiny.tiny_config("deepseek_v3")
    config.kv_lora_rank = 4096
    adapted = polysilicon.adapt(tiny.tiny_model(config, dtype=torch.float32))
    rows = [row for row in adapted.report.rows if row.kind == "attention"]
    assert rows
    assert {row.replaced_by for row in rows} == {"Attention"}
    assert all("its latents take more than its keys and values" in row.reason for row in rows)
    assert adapted.report.paged is None
