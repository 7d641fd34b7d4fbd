"""Tiny random models of any architecture that Transformers can build from its config alone.

A config is shrunk by rules over field names, so an architecture that nobody named here works too.
Everything that a replacement could get wrong is kept and made visible: windows are shorter than
the probe, softcaps and multipliers bite, norm weights and biases are random, head sizes stay
unequal to hidden/heads where they were. What the rules can't know is data, in `EXCEPTIONS`.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 160
#: Ids below this one are left to the special tokens; the probe uses the others.
FIRST_PLAIN_ID = 48
#: Shorter than every probe, so that windowed attention differs from full attention.
WINDOW = 8
MAX_POSITIONS = 128
MAX_LAYERS = 6

#: Integer fields by name, first match wins; a field never grows beyond its default.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|vocab_size_per_layer_input|ngram_vocab_size_base|group_vocab)$", VOCAB),
    (r"(hidden_size_per_layer_input|laurel_rank|gated_norm_rank|loop_gate_rank|adapter_rank)$", 8),
    (r"(hidden_size|d_model|n_embd|dim_model|emb_dim|embedding_size|embed_dim|lru_width)$", 64),
    (r"(hidden_size_global|word_embed_proj_dim|attention_hidden_size|backbone_hidden_size)$", 64),
    (r"(input_embedding_size|output_embedding_size|embedding_dim|encoder_cross_output_size)$", 64),
    (r"(cross_attention_hidden_size|adapter_in_dim|adapter_out_dim|adapter_input_size)$", 64),
    (r"(moe|expert)\w*(intermediate_size|ffn_hidden_size)(_mlp)?$", 32),
    (
        r"(intermediate_size|ffn_hidden_size|ffn_dim|n_inner|d_ff|dff|dim_ff|intermediate_size_mlp)$",
        96,
    ),
    (
        r"(feed_forward_size|d_inner|mamba_d_ssm|mamba_hidden_size|prefix_dense_intermediate_size)$",
        128,
    ),
    (r"(mamba_n_heads|mamba_num_heads)$", 8),
    (r"(num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|n_head_kv)$", 2),
    (r"(attention_heads|num_heads|n_heads?|indexer_kv_heads|num_attention_head)$", 4),
    (r"linear_num_key_heads$", 2),
    (r"(linear_num_value_heads|linear_num_heads)$", 4),
    (r"qk_rope_head_dim$", 8),
    (r"(head_dim|d_head|d_kv|dim_head|kv_channels|attention_head_size|rotary_dim)$", 16),
    (r"(mamba_d_head|mamba_headdim|linear_head_dim|linear_(key|value)_head_dim)$", 16),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank|hc_lowrank|mamba_dt_rank|time_step_rank)$", 16),
    (r"(state_size|mamba_d_state|ssm_state_size)$", 16),
    (r"(n_groups|mamba_n_groups|mamba_ngroups)$", 2),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|depth)$", 2),
    (r"(encoder_layers|num_encoder_layers)$", 2),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_expert)$", 8),
    (
        r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|n_group|num_expert_group)$",
        2,
    ),
    (r"(topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts)$", 1),
    (r"first_k_dense_replace$", 1),
    (r"(sliding_window|sliding_window_size|attention_window_size|window_size)$", WINDOW),
    (
        r"(attention_chunk_size|local_attention|attn_local_window|local_attention_window_len)$",
        WINDOW,
    ),
    (r"(index_topk|indexer_budget)$", WINDOW),
    (r"zero_expert_num$", 2),
    (r"(mamba_chunk_size|chunk_size|chunkwise_kernel)$", 8),
    (r"(max_position_embeddings|n_positions|n_ctx|model_max_length|max_seq_len)$", MAX_POSITIONS),
    (r"(max_target_positions|max_source_positions|context_length)$", MAX_POSITIONS),
    (r"(moe_latent_size|router_hidden_size|ple_embed_dim|d_rel|rel_extent)$", 16),
    (r"(sliding_window_pattern|full_attention_interval|no_rope_layer_interval)$", 2),
)
_SIZE_RULES = tuple((re.compile(rf"(^|_){pattern}"), value) for pattern, value in _SIZES)

#: A cap above the logits of a random model, or a factor of one, would hide a layer that drops it.
_SOFTCAP = re.compile(r"soft_?cap|logits_soft_cap|logit_cap")
_FACTOR = re.compile(r"multipliers?$|^logits?_scal|^embedding_scale$")
_SPECIAL_ID = re.compile(r"_(token_id|token_index|token_ids)$")

#: Model types whose forward takes several rows of ids, one a codebook, for one sequence.
ROWS_PER_SEQUENCE = {"musicgen_decoder": 4, "musicgen_melody_decoder": 4}

#: What the rules can't derive: model type → constructor arguments, set last.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # Hybrids whose default schedule has no attention in two layers.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2": {"full_attn_idxs": [1], "num_hidden_layers": 2},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    # Layers that share keys and values need a layer of their type before them.
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    # Fields without a usable default.
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0}},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "xmod": {"default_language": "en_XX"},
    # Sizes that depend on each other, or lie in a table, in ways of one model.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
        "head_dim": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "sliding_window": WINDOW,
        "per_layer_config": {
            1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32}
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "reformer": {
        "axial_pos_shape": (8, 16),
        "axial_pos_embds_dim": (16, 48),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
}


def names() -> tuple[str, ...]:
    """Every model type with a causal-LM class in the installed Transformers."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of `model_type` with every size shrunk and every feature kept."""
    config = shrink(CONFIG_MAPPING[model_type])
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def shrink(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of a class: fields by rule, per-layer lists cut at the same layers."""
    exceptions = EXCEPTIONS.get(config_class.model_type, {})
    config = config_class(**copy.deepcopy(exceptions))
    config.allow_global_per_layer_attribute_access = True
    kept = _layers_to_keep(config)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if not field.init or field.name == "transformers_version":
            continue
        new = _shrunk(field.name, getattr(config, field.name, None), field, kept, config)
        if new is not _DERIVED:
            values[field.name] = new
    if config.is_heterogeneous:
        values["per_layer_config"] = _per_layer_config(config, kept)
    return config_class(**(values | copy.deepcopy(exceptions)))


_DERIVED: Any = object()


def _shrunk(name: str, value: Any, field: Any, kept: list[int], config: PreTrainedConfig) -> Any:
    """The small value of one field, `_DERIVED` where the constructor shall work it out again."""
    if isinstance(value, PreTrainedConfig):
        return shrink(type(value))
    if isinstance(value, (list, tuple)) and len(value) == _depth(config) and kept:
        return [_scalar(name, value[i]) for i in kept]
    if name == _depth_field(config) and kept:
        return len(kept)
    if isinstance(value, dict) and "rope" in name:
        return _DERIVED if field.default is None else _shrunk_rope(value)
    if field.default == "auto" or (field.default is None and not _SPECIAL_ID.search(name)):
        return _DERIVED
    if isinstance(value, (list, tuple)) and _SPECIAL_ID.search(name):
        return [special_id(f"{name}{i}") for i in range(len(value))]
    if isinstance(value, (list, tuple)) and _FACTOR.search(name):
        return [_scalar(name, v) for v in value]
    return _scalar(_rule_name(name, config), value)


def _rule_name(name: str, config: PreTrainedConfig) -> str:
    """The name whose rule a field follows: latent attention has as many key heads as heads."""
    latent = name == "num_key_value_heads" and hasattr(config, "kv_lora_rank")
    return "num_attention_heads" if latent else name


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and _SPECIAL_ID.search(name):
        return special_id(name) if value >= 0 else value
    if isinstance(value, (int, float)) and value and _SOFTCAP.search(name):
        return 2.0
    if isinstance(value, float) and value == 1 and _FACTOR.search(name):
        return 0.75
    if isinstance(value, int):
        for pattern, small in _SIZE_RULES:
            if pattern.search(name):
                return min(value, small)
    return value


def special_id(name: str) -> int:
    """A token id below `FIRST_PLAIN_ID` that depends on the field's name only."""
    return 1 + sum(ord(c) * (i + 1) for i, c in enumerate(name)) % (FIRST_PLAIN_ID - 1)


def _shrunk_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with the pretraining length inside the probe's positions."""
    small = copy.deepcopy(parameters)
    for part in (small, *(v for v in small.values() if isinstance(v, dict))):
        if "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = MAX_POSITIONS // 4
            if "factor" in part:
                part["factor"] = min(part["factor"], 4.0)
    return small


def _per_layer_config(config: PreTrainedConfig, kept: list[int]) -> dict[int, dict[str, Any]]:
    """What single layers override, at the kept layers; a larger size stays larger."""
    small: dict[int, dict[str, Any]] = {}
    for index, layer in enumerate(kept):
        own = config.per_layer_config[layer]
        for name in config.per_layer_attributes or ():
            value, usual = getattr(own, name), getattr(config, name)
            if value != usual:
                rule = _rule_name(name, config)
                new, small_usual = _scalar(rule, value), _scalar(rule, usual)
                small.setdefault(index, {})[name] = _apart(value, usual, new, small_usual)
    return small


def _apart(value: Any, usual: Any, new: Any, small_usual: Any) -> Any:
    """`new`, moved away from `small_usual` where only the shrinking made the two equal."""
    if not isinstance(value, int) or not isinstance(usual, int) or new != small_usual:
        return new
    return 2 * new if value > usual else new // 2


def _depth_field(config: PreTrainedConfig) -> str:
    name: str = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return name


def _depth(config: PreTrainedConfig) -> int:
    depth = getattr(config, _depth_field(config), -1)
    return depth if isinstance(depth, int) else -1


def _layers_to_keep(config: PreTrainedConfig) -> list[int]:
    """Layers that show every combination of the per-layer lists, in order; empty without lists."""
    depth = _depth(config)
    fields = [getattr(config, f.name, None) for f in dataclasses.fields(config)]
    lists = [v for v in fields if isinstance(v, (list, tuple)) and len(v) == depth]
    if not lists or depth < 2:
        return []
    first: dict[tuple[str, ...], int] = {}
    for layer in range(depth):
        first.setdefault(tuple(str(v[layer]) for v in lists), layer)
    kept = sorted(first.values())[: MAX_LAYERS - 1]
    return sorted({*kept, depth - 1})


def tiny_model(config: PreTrainedConfig, *, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A causal LM of `config` with random weights, the same values in every dtype of one seed."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config = copy.deepcopy(_config_for(model_class, config))
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    if dtype == torch.float32:
        return model
    # Not `.to(dtype)`: that would also round the rotary frequencies, which from_pretrained keeps.
    converted: PreTrainedModel = model_class._from_config(copy.deepcopy(config), dtype=dtype).eval()
    converted.load_state_dict(model.state_dict())
    return converted


def _config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a composite config that the model class takes: its text or decoder config."""
    if isinstance(config, model_class.config_class):
        return config
    parts = [v for v in vars(config).values() if isinstance(v, model_class.config_class)]
    return parts[0] if parts else config


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Gives every parameter and saved float buffer a random value that bfloat16 holds exactly.

    Matrices get variance 1/fan-in; vectors (norms, biases, sinks, decays) keep their start value
    and get noise, because a model's own start values (ones, zeros) would hide what is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = set(model.state_dict())
    buffers = [b for n, b in model.named_buffers() if n in saved and b.is_floating_point()]
    for tensor in (*model.parameters(), *buffers):
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() >= 2 and min(tensor.shape[-2:]) > 1:
            value = noise * max(tensor.shape[1:-1] + tensor.shape[-1:]) ** -0.5
        else:
            value = tensor.float() + 0.2 * noise
        tensor.copy_(value.to(torch.bfloat16))
