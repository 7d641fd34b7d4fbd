"""Tiny random models for the tests of adapt()."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: What a family needs beyond SIZES so that its features show at the length of a test.
FEATURES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Transformers 5.17 picks SDPA, which drops the softcap that the model is defined with.
    "gemma2": {"sliding_window": 8, "attn_implementation": "eager"},
    "granite": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 4.0,
        "logits_scaling": 2.0,
    },
    "phi3": {"sliding_window": 8},
}


def tiny(kind: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A seeded model of a family; vectors are random too, so that no norm weight is plain ones."""
    config = AutoConfig.for_model(kind, **{**SIZES, **FEATURES.get(kind, {}), **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.15
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, scale)
    return model
