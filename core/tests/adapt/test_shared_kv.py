"""Layers that attend to the keys and values of an earlier layer, with heads of several sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

import polysilicon
from polysilicon.engine import Engine, SamplingParams

TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def model() -> Any:
    """Gemma 4 in small: its last two layers read the cache of layers 2 and 3."""
    config = Gemma4TextConfig(
        vocab_size=200,
        vocab_size_per_layer_input=200,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        layer_types=TYPES,
        num_kv_shared_layers=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(2)
    return [torch.randint(3, 200, (n,), generator=source).tolist() for n in (3, 11, 12, 25)]


def test_readers_hold_no_cache_of_their_own(model: Any) -> None:
    adapted = polysilicon.adapt(model)
    assert adapted.report.missing == ()
    assert adapted.report.paged is None
    owners = [adapted.attention.index(layer.cache_owner) for layer in adapted.attention]
    assert owners == [0, 1, 2, 3, 3, 2]
    assert [layer.cache_bytes(1) // 4 for layer in adapted.attention] == [64, 64, 128, 64, 0, 0]
    assert [layer.head_dim for layer in adapted.attention] == [16, 16, 32, 16, 16, 32]


@pytest.mark.parametrize("tokens", [512, 7])
def test_the_engine_gives_transformers_own_greedy_tokens(model: Any, tokens: int) -> None:
    twin = copy.deepcopy(model)
    engine = Engine(model, max_batch=3, block_size=4, num_blocks=25, max_tokens_per_step=tokens)
    for prompt, output in zip(prompts(), engine.generate(prompts(), GREEDY), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = twin(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < 1e-4


@pytest.mark.parametrize("wanted", [1, 2, 5])
def test_queries_that_no_layer_behind_needs_are_dropped_as_before(model: Any, wanted: int) -> None:
    """Its reading layers see only the last queries then, which have no mask to tell them apart."""
    ids = torch.tensor(prompts()[3])[None]
    with torch.no_grad():
        expected = model(ids, logits_to_keep=wanted).logits
        polysilicon.adapt(model)
        after = model(ids, logits_to_keep=wanted).logits
    assert (after - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_generate_with_left_padding_goes_on_working(model: Any) -> None:
    ids = torch.tensor([[0] * 4 + prompts()[1][:8], prompts()[2]])
    asked = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = model.generate(ids, **asked)
    polysilicon.adapt(model)
    assert torch.equal(model.generate(ids, **asked), expected)
