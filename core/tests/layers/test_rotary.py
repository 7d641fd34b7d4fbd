"""Rotary layers against the formulas of Transformers, on its own configs."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, Qwen2VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from polysilicon.layers.rotary import RotaryEmbedding
from polysilicon.layers.rotary_scaling import RULES, frequencies

SHORT = [1.0 + 0.01 * i for i in range(16)]
LONG = [2.0 + 0.5 * i for i in range(16)]
SETTINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
    "longrope factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
        "factor": 8.0,
        "attention_factor": 1.3,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def llama(**parameters: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )


def ours(config: LlamaConfig) -> RotaryEmbedding:
    return RotaryEmbedding(frequencies(config.rope_parameters, head_size=32, max_positions=256))


def test_every_rule_of_transformers_is_known_and_tested() -> None:
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == set(RULES)
    assert {str(s["rope_type"]) for s in SETTINGS.values()} == set(RULES)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 255, 256, 257, 1000])
def test_angles_equal_transformers(name: str, length: int) -> None:
    config = llama(**SETTINGS[name])
    x, positions = torch.zeros(1, length, 4), torch.arange(length).unsqueeze(0)
    expected = LlamaRotaryEmbedding(config)(x, positions)
    # Angles reach 1000, where one float32 unit is 6e-5.
    torch.testing.assert_close(ours(config)(x, positions), expected, rtol=0, atol=1.5e-4)


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_partial_rotary_frequencies_equal_transformers(share: float) -> None:
    config = llama(rope_type="linear", factor=2.0, partial_rotary_factor=share)
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](config)
    torch.testing.assert_close(ours(config).inv_freq, expected)


@pytest.mark.parametrize("name", ["default", "dynamic", "longrope"])
def test_one_graph_serves_all_lengths(name: str) -> None:
    layer = ours(llama(**SETTINGS[name]))
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for length in (5, 70, 300):
        positions = torch.arange(length).unsqueeze(0)
        x = torch.zeros(1, length, 4)
        torch.testing.assert_close(compiled(x, positions), layer(x, positions))


def test_chunked_sections_equal_qwen2_vl() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    config = Qwen2VLTextConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, rope_parameters=parameters
    )
    layer = RotaryEmbedding(
        frequencies(parameters, head_size=32, max_positions=64), sections=[4, 6, 6]
    )
    x, positions = torch.zeros(2, 7, 4), torch.randint(50, (3, 2, 7))
    expected = Qwen2VLRotaryEmbedding(config)(x, positions)
    torch.testing.assert_close(layer(x, positions), expected)


def test_interleaved_sections_equal_qwen3_5() -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    config = Qwen3_5TextConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=parameters
    )
    layer = RotaryEmbedding(
        frequencies(config.rope_parameters, head_size=32, max_positions=64),
        sections=config.rope_parameters["mrope_section"],
        sections_interleaved=True,
    )
    x, positions = torch.zeros(2, 7, 4), torch.randint(50, (3, 2, 7))
    expected = Qwen3_5TextRotaryEmbedding(config)(x, positions)
    torch.testing.assert_close(layer(x, positions), expected)


def test_output_forms_repeat_the_same_angles() -> None:
    rates, x, positions = torch.rand(4), torch.zeros(1, 3, 8), torch.arange(3).unsqueeze(0)
    half = RotaryEmbedding(rates, output="half")(x, positions)[0]
    pairs = RotaryEmbedding(rates, output="repeated")(x, positions)[0]
    assert torch.equal(RotaryEmbedding(rates)(x, positions)[0], torch.cat((half, half), -1))
    assert torch.equal(pairs[..., ::2], half)
    assert torch.equal(pairs[..., 1::2], half)


def test_frequencies_stay_float32_when_the_model_is_cast() -> None:
    layer = RotaryEmbedding(torch.rand(4)).to(torch.bfloat16)
    assert layer.inv_freq.dtype == torch.float32
    assert layer.problems()["rotary_cos_sin"].dtype == "bfloat16"
    cos, _ = layer(torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.tensor([[0]]))
    assert cos.dtype == torch.bfloat16


def test_bad_settings_say_what_is_missing() -> None:
    with pytest.raises(ValueError, match="'spiral' is not known: one of default"):
        frequencies({"rope_type": "spiral"}, head_size=8, max_positions=64)
    with pytest.raises(ValueError, match="'linear' needs 'factor'"):
        frequencies({"rope_type": "linear", "rope_theta": 1e4}, head_size=8, max_positions=64)
    with pytest.raises(ValueError, match="output is 'double'"):
        RotaryEmbedding(torch.rand(4), output="double")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sum to 3, but there are 4"):
        RotaryEmbedding(torch.rand(4), sections=[1, 1, 1])
    assert math.isclose(RotaryEmbedding(torch.rand(4), 1.5).scaling, 1.5)
