"""Shapes of a model from its config."""

from __future__ import annotations

import transformers
from loading_models import TINY

from polysilicon.loading import model_shapes


def test_every_layer_of_a_model_is_listed_once() -> None:
    config = transformers.AutoConfig.for_model("llama", **TINY)
    found = {(s.role, s.shape): s.modules for s in model_shapes(config)}
    assert found["attention", (4, 2, 16)] == (
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    )
    assert found["linear", (32, 64)][:2] == (
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
    )
    assert found["linear", (128, 64)] == ("lm_head",)
    assert found["embedding", (128, 64)] == ("model.embed_tokens",)
    assert len(found["norm", (64,)]) == 5
    assert {role for role, _ in found} == {"linear", "embedding", "norm", "attention"}


def test_no_memory_is_needed_for_a_large_model() -> None:
    config = transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=2, vocab_size=128256)
    roles = [shape.role for shape in model_shapes(config)]
    assert "attention" in roles
