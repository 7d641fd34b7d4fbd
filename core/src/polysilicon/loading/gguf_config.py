"""A Transformers config and tokenizer from a GGUF file's metadata.

Key names come from Transformers' own tables; what those leave out (rope scaling, softcaps, head
sizes, Gemma's large models) is added here, because a config that silently takes a default gives a
model that is silently wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from polysilicon.loading.gguf_header import GgufHeader

#: GGUF architecture → Transformers model type. Only what a test loads and compares is listed.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
}

#: Metadata that Transformers' tables do not map, where the config class has the field.
_EXTRA_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

#: Layer counts of the Gemma models whose queries are scaled by hidden size / heads.
_GEMMA_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}


def build_config(header: GgufHeader, rope_factors: dict[str, list[float]]) -> PreTrainedConfig:
    """The config of the model in a GGUF file.

    Args:
        header: the file's header.
        rope_factors: values of its `rope_freqs` / `rope_factors_*` tensors, by tensor name.

    Raises:
        LoadError: the architecture is not supported, or its metadata do not make a config.
    """
    from transformers import AutoConfig

    if header.architecture not in MODEL_TYPES:
        raise LoadError(
            f"{header.path} holds GGUF architecture {header.architecture!r}: expected one of "
            f"{', '.join(MODEL_TYPES)}; load the model's Hugging Face folder instead"
        )
    model_type = MODEL_TYPES[header.architecture]
    values = _mapped_values(header)
    if header.architecture in _GEMMA_SCALED_BY_HIDDEN:
        values["query_pre_attn_scalar"] = _gemma_scalar(header, values)
    try:
        config: PreTrainedConfig = AutoConfig.for_model(model_type)
        values.update(
            (field, header.get(key))
            for key, field in _EXTRA_KEYS.items()
            if header.get(key) is not None and hasattr(config, field)
        )
        config = AutoConfig.for_model(model_type, **values)
        _set_rope(config, header, rope_factors)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(
            f"{header.path} has metadata that make no {model_type} config: {error}"
        ) from error
    return config


def _mapped_values(header: GgufHeader) -> dict[str, Any]:
    from transformers.integrations import GGUF_CONFIG_MAPPING

    names = GGUF_CONFIG_MAPPING[header.architecture]
    values = {
        to: header.get(key) for key, to in names.items() if to and header.get(key) is not None
    }
    missing = [key for key in ("block_count", "embedding_length") if header.get(key) is None]
    if missing:
        raise LoadError(f"{header.path} lacks {header.architecture}.{missing[0]}: convert it again")
    if "token_embd.weight" not in header.tensors:
        raise LoadError(f"{header.path} has no token_embd.weight: it is no language model")
    values["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    for key, field in GGUF_CONFIG_MAPPING["tokenizer"].items():
        values[field] = header.metadata.get(f"tokenizer.{key}")
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    return values


def _gemma_scalar(header: GgufHeader, values: dict[str, Any]) -> int:
    if values["num_hidden_layers"] == _GEMMA_SCALED_BY_HIDDEN[header.architecture]:
        return int(values["hidden_size"] // values["num_attention_heads"])
    return int(header.get("attention.key_length", 256))


def _set_rope(
    config: PreTrainedConfig, header: GgufHeader, factors: dict[str, list[float]]
) -> None:
    scaling = _scaling(config, header, factors)
    if scaling is None:
        return
    rope = config.rope_parameters
    # Gemma 3 keeps one table a layer type; only its full attention is scaled.
    target = rope.get("full_attention", rope)
    target.update(scaling)


def _scaling(
    config: PreTrainedConfig, header: GgufHeader, factors: dict[str, list[float]]
) -> dict[str, Any] | None:
    original = header.get("rope.scaling.original_context_length")
    if factors:
        # One divisor per frequency; Llama 3's table is the same for short and long texts.
        long = factors.get("rope_factors_long.weight", factors.get("rope_freqs.weight"))
        short = factors.get("rope_factors_short.weight", long)
        if long is None:
            raise LoadError(
                f"{header.path} has short rope factors and no long ones: convert it again"
            )
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": header.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original or config.max_position_embeddings,
        }
    kind = header.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise LoadError(f"{header.path} has rope scaling {kind!r}: expected none, linear or yarn")
    scaling = {"rope_type": kind, "factor": header.get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or config.max_position_embeddings
    return scaling


def build_tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a GGUF file with its chat template, None where the file carries none."""
    if header.metadata.get("tokenizer.ggml.model") in (None, "none"):
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError:
        raise LoadError(
            "GGUF files need transformers 5.24 or newer: pip install -U transformers"
        ) from None
    try:
        architecture, vocabulary, options = get_gguf_tokenizer(str(header.path))
        backend, more = convert_gguf_tokenizer(architecture, vocabulary)
        options = {**options, **more}
        options["model_max_length"] = header.get("context_length", int(1e30))
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
            tokenizer_object=backend, **options
        )
    except Exception as error:
        raise LoadError(f"the tokenizer in {header.path} cannot be built: {error}") from error
    return tokenizer
