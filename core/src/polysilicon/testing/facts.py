"""The problem that one call of an op poses: what a kernel's `supports` is asked about a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.codes import named, out_features
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from polysilicon.ops.contract import Op, Sample

    Facts = dict[str, Any]
    Arguments = Mapping[str, Any]


def problem_of(op: Op, sample: Sample, dtype: str) -> Problem:
    """The problem of a sample, its token count included."""
    tokens = max(1, tokens_of(op, sample))
    facts = _FACTS[op.name](sample.kwargs)
    return Problem(op=op.name, dtype=dtype, tokens=(tokens, tokens), facts=facts)


def tokens_of(op: Op, sample: Sample) -> int:
    """How many tokens a sample has."""
    return op.tokens(next(iter(sample.kwargs.values())))


def _rms_norm(given: Arguments) -> Facts:
    return {
        "hidden": given["x"].shape[-1],
        "eps": given["eps"],
        "offset": given.get("offset", 0.0),
        "weight": given["weight"] is not None,
    }


def _rms_norm_gated(given: Arguments) -> Facts:
    return _rms_norm(given) | {
        "norm_before_gate": given.get("norm_before_gate", False),
        "group_size": given.get("group_size", 0),
    }


def _layer_norm(given: Arguments) -> Facts:
    return _rms_norm(given) | {"bias": given["bias"] is not None}


def _rotary_cos_sin(given: Arguments) -> Facts:
    return {
        "rotary": 2 * given["inv_freq"].shape[-1],
        "scaling": given["scaling"],
        "sections": ",".join(map(str, given.get("sections", ()))),
        "sections_interleaved": given.get("sections_interleaved", False),
    }


def _rotary_embedding(given: Arguments) -> Facts:
    return {
        "head_size": given["q"].shape[-1],
        "rotary": 2 * given["cos"].shape[-1],
        "interleaved": given["interleaved"],
    }


def _activation(given: Arguments) -> Facts:
    return {"width": given["x"].shape[-1], "kind": given["kind"]}


def _silu_and_mul(given: Arguments) -> Facts:
    return {"width": given["x"].shape[-1] // 2}


def _gelu_and_mul(given: Arguments) -> Facts:
    return _silu_and_mul(given) | {"approximate": given["approximate"]}


def _linear(given: Arguments) -> Facts:
    out, width = given["weight"].shape
    return {"in": width, "out": out, "bias": given["bias"] is not None}


def _embedding(given: Arguments) -> Facts:
    vocabulary, hidden = given["weight"].shape
    return {"vocabulary": vocabulary, "hidden": hidden, "scale": given.get("scale", 1.0)}


def _lm_head(given: Arguments) -> Facts:
    return _embedding(given) | {
        "bias": given["bias"] is not None,
        "softcap": given.get("softcap", 0.0),
    }


def _moe_router(given: Arguments) -> Facts:
    return {
        "experts": given["logits"].shape[-1],
        "top_k": given["top_k"],
        "scoring": given["scoring"],
        "groups": given["groups"],
        "renormalize": given["renormalize"],
        "bias": given["bias"] is not None,
    }


def _experts(given: Arguments) -> Facts:
    experts, hidden, width = given["down"].shape
    return {
        "experts": experts,
        "top_k": given["indices"].shape[-1],
        "hidden": hidden,
        "width": width,
        "activation": given["activation"],
        "gated": given["gated"],
        "bias": given["up_bias"] is not None,
    }


def _causal_conv1d(given: Arguments) -> Facts:
    channels, taps = given["weight"].shape
    return {
        "channels": channels,
        "taps": taps,
        "activation": given["activation"],
        "bias": given["bias"] is not None,
    }


def _ssd(given: Arguments) -> Facts:
    return {
        "heads": given["x"].shape[1],
        "head_size": given["x"].shape[2],
        "groups": given["b"].shape[1],
        "state": given["b"].shape[2],
        "chunk": given["chunk"],
    }


def _selective_scan(given: Arguments) -> Facts:
    return {
        "channels": given["x"].shape[1],
        "state": given["b"].shape[1],
        "chunk": given["chunk"],
    }


def _gated_delta_rule(given: Arguments) -> Facts:
    return {
        "key_heads": given["k"].shape[1],
        "value_heads": given["v"].shape[1],
        "head_size": given["k"].shape[2],
        "v_head_size": given["v"].shape[2],
        "normalize": given["normalize"],
        "by_channel": given["g"].dim() == 3,
        "chunk": given["chunk"],
    }


def _kv_store(given: Arguments) -> Facts:
    return {
        "kv_heads": given["k"].shape[1],
        "head_size": given["k"].shape[2],
        "v_head_size": given["v"].shape[2],
        "block_size": given["k_cache"].shape[1],
    }


def _rule(given: Arguments) -> Facts:
    return {
        "heads": given["q"].shape[1],
        "head_size": given["q"].shape[-1],
        "window": given["window"],
        "softcap": given["softcap"] > 0,
        "sinks": given["sinks"] is not None,
        "causal": given["causal"],
    }


def _paged_attention(given: Arguments) -> Facts:
    return _rule(given) | {
        "kv_heads": given["k_cache"].shape[2],
        "v_head_size": given["v_cache"].shape[3],
        "block_size": given["k_cache"].shape[1],
    }


def _attention(given: Arguments) -> Facts:
    return _rule(given) | {"kv_heads": given["k"].shape[1], "v_head_size": given["v"].shape[3]}


def _latent_store(given: Arguments) -> Facts:
    return {
        "rank": given["latent"].shape[1],
        "rope": given["rotary"].shape[1],
        "block_size": given["cache"].shape[1],
    }


def _latent_attention(given: Arguments) -> Facts:
    return {
        "heads": given["q"].shape[1],
        "rank": given["rank"],
        "rope": given["q"].shape[2] - given["rank"],
        "causal": given["causal"],
        "block_size": given["cache"].shape[1],
    }


def _sampling(given: Arguments) -> Facts:
    return {"vocabulary": given["logits"].shape[-1]}


def _quantize(given: Arguments) -> Facts:
    return {"hidden": given["x"].shape[-1], "format": given["format"]}


def _dequantize(given: Arguments) -> Facts:
    stored = named(given["format"])
    return {
        "in": given["in_features"],
        "out": out_features(stored, given["weight"]),
        "format": given["format"],
        "act_order": given["g_idx"] is not None,
    }


def _quantized_linear(given: Arguments) -> Facts:
    return _dequantize({**given, "in_features": given["x"].shape[-1]}) | {
        "bias": given["bias"] is not None,
        "activation": given["activation"],
    }


def _quantized_grouped_linear(given: Arguments) -> Facts:
    return _quantized_linear(given) | {"experts": given["offsets"].shape[0]}


def _moe_permute(given: Arguments) -> Facts:
    return {"experts": given["experts"], "top_k": given["indices"].shape[1]}


def _rms_norm_quant(given: Arguments) -> Facts:
    return _rms_norm(given) | {"format": given["format"]}


def _silu_and_mul_quant(given: Arguments) -> Facts:
    return _silu_and_mul(given) | {"format": given["format"]}


#: op → the facts of a call; a test holds the keys against `Op.keys`.
_FACTS: dict[str, Callable[[Arguments], Facts]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _rms_norm,
    "rms_norm_gated": _rms_norm_gated,
    "layer_norm": _layer_norm,
    "rotary_cos_sin": _rotary_cos_sin,
    "rotary_embedding": _rotary_embedding,
    "activation": _activation,
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "linear": _linear,
    "embedding": _embedding,
    "lm_head": _lm_head,
    "moe_router": _moe_router,
    "experts": _experts,
    "causal_conv1d": _causal_conv1d,
    "ssd": _ssd,
    "selective_scan": _selective_scan,
    "gated_delta_rule": _gated_delta_rule,
    "kv_store": _kv_store,
    "paged_attention": _paged_attention,
    "attention": _attention,
    "latent_store": _latent_store,
    "latent_attention": _latent_attention,
    "sampling": _sampling,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "quantized_linear": _quantized_linear,
    "quantized_grouped_linear": _quantized_grouped_linear,
    "moe_permute": _moe_permute,
    "rms_norm_quant": _rms_norm_quant,
    "silu_and_mul_quant": _silu_and_mul_quant,
}
