"""Tiny random models, and what Transformers' generate answers with them."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

import polysilicon
from polysilicon.engine import Engine, SamplingParams

if TYPE_CHECKING:
    from polysilicon.adapt import Adapted

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    # Windows shorter than the prompts, so that what lies outside matters.
    "gemma3": Gemma3TextConfig(
        **SIZES,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=10),
    "granite": GraniteConfig(**SIZES, attention_multiplier=0.2, residual_multiplier=0.5),
    "phi3": Phi3Config(**SIZES, original_max_position_embeddings=256),
    "olmo2": Olmo2Config(**SIZES),
}
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW)


class Case:
    """One model, prompts of many lengths, and what Transformers answers."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(5)
        # A copy, because adapt() notes its attention in the config.
        self.model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
        rng = random.Random(7)
        self.prompts = [
            [rng.randrange(SIZES["vocab_size"]) for _ in range(length)]
            for length in (1, 2, 5, 16, 17, 31, 40, 64)
        ]
        self.expected = [self._generate(prompt) for prompt in self.prompts]
        self.adapted: Adapted = polysilicon.adapt(self.model)

    def _generate(self, prompt: list[int]) -> tuple[int, ...]:
        ids = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
        )
        return tuple(ids[0, len(prompt) :].tolist())

    def engine(self, **options: Any) -> Engine:
        return Engine(self.adapted, **({"compile": False, "num_blocks": 64} | options))
