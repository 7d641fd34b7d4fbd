"""Tiny random models of any type, and their logits."""

from __future__ import annotations

from typing import Any

import torch
import transformers

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        # Norm weights start as constants: random ones show a forgotten offset.
        torch.nn.init.normal_(parameter, std=0.05)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.arange(3, 40)[None]).logits
    return result
