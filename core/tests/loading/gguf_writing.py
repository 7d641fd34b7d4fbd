"""Writes a Transformers model as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

if TYPE_CHECKING:
    from pathlib import Path

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
}


def write_gguf(path: Path, model: Any, arch: str, kinds: tuple[Kind, ...] = (Kind.F32,)) -> None:
    """One file with the model's weights; matrices take the quantisation `kinds` in turn."""
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, model.config, arch)
    key = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(key, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        if tied and name == "lm_head.weight":
            continue
        module, _, leaf = name.rpartition(".")
        values = _arranged(arch, name, tensor.float().numpy(), model.config)
        kind = kinds[index % len(kinds)] if values.ndim == 2 else Kind.F32
        writer.add_tensor(
            f"{table.get_name(module)}.{leaf}", gguf.quantize(values, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    for key, field in _KEYS.items():
        value = getattr(config, field, None)
        if value is not None:
            writer.add_uint32(f"{arch}.{key}", int(value))
    if hasattr(config, "rms_norm_eps"):
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    if hasattr(config, "norm_epsilon"):
        writer.add_float32(f"{arch}.attention.layer_norm_epsilon", config.norm_epsilon)
    rope = config.rope_parameters
    theta = rope.get("full_attention", rope)["rope_theta"]
    writer.add_float32(f"{arch}.rope.freq_base", theta)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            writer.add_float32(f"{arch}.{name}", getattr(config, name))
    for key in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", getattr(config, f"{key}_token_id"))


def _arranged(arch: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values
