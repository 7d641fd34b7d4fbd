"""Layers as a model has them, small: what LayerSuite composes from a plugin's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysilicon import formats
from polysilicon.encoding import encode
from polysilicon.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    GatedActivation,
    GatedMLP,
    GatedRMSNorm,
    LatentAttention,
    Layer,
    LayerNorm,
    Linear,
    LMHead,
    PagedBatch,
    QuantizedExperts,
    QuantizedLinear,
    RMSNorm,
    RotaryEmbedding,
    Router,
    allocate_kv_cache,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.ops.samples import Source

HIDDEN, WIDTH, VOCABULARY = 48, 80, 131
HEADS, KV_HEADS, HEAD = 4, 2, 16
TOKENS = 7  # a prime, and two sequences of 4 and 3 where a step is paged
BLOCK = 4


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """A layer, its arguments, and how it is called; `arrange` readies it after a cast."""

    layer: Layer
    arguments: tuple[Tensor, ...]
    call: Callable[..., Any] = lambda layer, *arguments: layer(*arguments)
    arrange: Callable[[Any, torch.dtype, torch.device], None] = lambda layer, dtype, device: None


def _weight(source: Source, *shape: int) -> nn.Parameter:
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return nn.Parameter(source.normal(*shape, magnitude=scale), requires_grad=False)


def _x(source: Source, width: int = HIDDEN) -> Tensor:
    return source.normal(1, TOKENS, width)


def _norm(source: Source) -> LayerCall:
    return LayerCall(layer=RMSNorm(_weight(source, HIDDEN), 1e-6), arguments=(_x(source),))


def _plain_norm(source: Source) -> LayerCall:
    layer = RMSNorm(None, 1e-6, hidden=HIDDEN, dtype=source.dtype)
    return LayerCall(layer=layer, arguments=(_x(source),))


def _add_norm(source: Source) -> LayerCall:
    layer = RMSNorm(_weight(source, HIDDEN), 1e-6, offset=1.0)
    return LayerCall(
        layer=layer,
        arguments=(_x(source), _x(source)),
        call=lambda layer, x, residual: layer.forward_add(x, residual),
    )


def _gated_norm(source: Source) -> LayerCall:
    layer = GatedRMSNorm(_weight(source, HIDDEN), 1e-6, group_size=16)
    return LayerCall(layer=layer, arguments=(_x(source), _x(source)))


def _layer_norm(source: Source) -> LayerCall:
    layer = LayerNorm(_weight(source, HIDDEN), _weight(source, HIDDEN), 1e-5)
    return LayerCall(layer=layer, arguments=(_x(source),))


def _bias_norm(source: Source) -> LayerCall:
    layer = LayerNorm(None, _weight(source, HIDDEN), 1e-5, dtype=source.dtype)
    return LayerCall(layer=layer, arguments=(_x(source),))


def _activation(source: Source) -> LayerCall:
    return LayerCall(layer=Activation("gelu_new", dtype=source.dtype), arguments=(_x(source),))


def _gated(kind: str) -> Callable[[Source], LayerCall]:
    def build(source: Source) -> LayerCall:
        layer = GatedActivation(kind, width=HIDDEN // 2, dtype=source.dtype)
        return LayerCall(layer=layer, arguments=(_x(source),))

    return build


def _linear(source: Source) -> LayerCall:
    layer = Linear(_weight(source, WIDTH, HIDDEN), _weight(source, WIDTH))
    return LayerCall(layer=layer, arguments=(_x(source),))


def _transposed_linear(source: Source) -> LayerCall:
    layer = Linear(_weight(source, HIDDEN, WIDTH), _weight(source, WIDTH), transposed=True)
    return LayerCall(layer=layer, arguments=(_x(source),))


def _quantized(format: str, activation: str = "") -> Callable[[Source], LayerCall]:
    def build(source: Source) -> LayerCall:
        width = 128  # one whole group
        stored = formats.parse(format)
        tensors = encode(stored, _weight(source, WIDTH, width).float().cpu())
        names = formats.code_of(stored).names
        layer = QuantizedLinear(
            {names[argument][0]: tensor.to(source.device) for argument, tensor in tensors.items()},
            stored,
            bias=_weight(source, WIDTH),
            activation=activation,
            in_features=width,
            dtype=source.dtype,
        )
        return LayerCall(layer=layer, arguments=(_x(source, width),))

    return build


def _quantized_experts(source: Source) -> LayerCall:
    experts, width, inner = 3, 64, 32
    tensors: dict[str, Tensor] = {}
    for key, shape in (("gate_up_proj", (2 * inner, width)), ("down_proj", (width, inner))):
        stored = encode(formats.MXFP4, _weight(source, experts, *shape).float().cpu())
        tensors[f"{key}_blocks"] = stored["weight"].to(source.device)
        tensors[f"{key}_scales"] = stored["scale"].to(source.device)
        tensors[f"{key}_bias"] = _weight(source, experts, shape[0])
    layer = QuantizedExperts(
        tensors, formats.MXFP4, interleaved=True, alpha=1.702, limit=7.0, dtype=source.dtype
    )
    weights = source.normal(TOKENS, 2).abs()
    arguments = (source.normal(TOKENS, width), source.integers(experts, TOKENS, 2), weights)
    return LayerCall(layer=layer, arguments=arguments)


def _mlp(source: Source) -> LayerCall:
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    gate, up, down = (Linear(_weight(source, *shape)) for shape in shapes)
    return LayerCall(layer=GatedMLP(gate, up, down, "silu"), arguments=(_x(source),))


def _embedding(source: Source) -> LayerCall:
    layer = Embedding(_weight(source, VOCABULARY, HIDDEN), 6.5)
    return LayerCall(layer=layer, arguments=(source.integers(VOCABULARY, 1, TOKENS),))


def _lm_head(source: Source) -> LayerCall:
    layer = LMHead(_weight(source, VOCABULARY, HIDDEN), None, 0.5, 30.0)
    return LayerCall(layer=layer, arguments=(_x(source),))


def _rotary(source: Source) -> LayerCall:
    angles = 10_000.0 ** (torch.arange(0, HEAD, 2) / -HEAD)
    layer = RotaryEmbedding(angles.to(source.device), dtype=source.dtype)
    positions = torch.arange(TOKENS, device=source.device)[None]
    return LayerCall(layer=layer, arguments=(_x(source), positions))


def _router(source: Source) -> LayerCall:
    layer = Router(_weight(source, 8, HIDDEN), top_k=2, renormalize=True)
    # Which of two experts that nearly tie is chosen may differ by rounding: logits only.
    return LayerCall(
        layer=layer, arguments=(_x(source),), call=lambda layer, *arguments: layer(*arguments)[0]
    )


def _experts(source: Source) -> LayerCall:
    layer = Experts(_weight(source, 5, 2 * WIDTH, HIDDEN), _weight(source, 5, HIDDEN, WIDTH))
    indices = source.integers(5, TOKENS, 2)
    arguments = (_x(source)[0], indices, source.normal(TOKENS, 2).abs())
    return LayerCall(layer=layer, arguments=arguments)


def _qkv(source: Source) -> tuple[Tensor, ...]:
    return tuple(source.normal(1, heads, TOKENS, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS))


def _attention(**rule: Any) -> Callable[[Source], LayerCall]:
    def build(source: Source) -> LayerCall:
        layer = Attention(HEADS, KV_HEADS, HEAD, scale=HEAD**-0.5, dtype=source.dtype, **rule)
        return LayerCall(layer=layer, arguments=_qkv(source))

    return build


def _paged(source: Source) -> LayerCall:
    layer = Attention(HEADS, KV_HEADS, HEAD, scale=HEAD**-0.5, dtype=source.dtype)

    def arrange(layer: Attention, dtype: torch.dtype, device: torch.device) -> None:
        caches = allocate_kv_cache(6, BLOCK, KV_HEADS, HEAD, dtype=dtype, device=device)
        layer.attach_cache(*caches)

    layer.context.batch = _step(source)
    return LayerCall(layer=layer, arguments=_qkv(source), arrange=arrange)


def _latent(source: Source, *, paged: bool = False) -> LayerCall:
    nope, rope, value, rank = 16, 8, 24, 32
    projection = Linear(_weight(source, HEADS * (nope + value), rank))
    layer = LatentAttention(projection, HEADS, nope, rope, value, scale=0.2)
    q = source.normal(1, HEADS, TOKENS, nope + rope)
    latents = source.normal(1, TOKENS, rank), source.normal(1, TOKENS, rope)

    def arrange(layer: LatentAttention, dtype: torch.dtype, device: torch.device) -> None:
        layer.projection.to(device, dtype)
        layer.allocate_cache(6, BLOCK, device=device)

    layer.context.batch = _step(source) if paged else None
    return LayerCall(layer=layer, arguments=(q, *latents), arrange=arrange)


def _paged_latent(source: Source) -> LayerCall:
    return _latent(source, paged=True)


def _step(source: Source) -> PagedBatch:
    blocks, lengths = ((4,), (2,)), (4, 3)
    slots = [
        table[0] * BLOCK + i for table, n in zip(blocks, lengths, strict=True) for i in range(n)
    ]

    def integers(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=source.device)

    return PagedBatch(
        slots=integers(slots, torch.int64),
        block_tables=integers(blocks),
        query_starts=integers((0, 4, 7)),
        kv_lengths=integers(lengths),
        max_query=4,
        max_kv=4,
    )


#: Name → how it is built; a gap names it so.
LAYERS: dict[str, Callable[[Source], LayerCall]] = {
    "RMSNorm": _norm,
    "RMSNorm without weight": _plain_norm,
    "RMSNorm.forward_add": _add_norm,
    "GatedRMSNorm": _gated_norm,
    "LayerNorm": _layer_norm,
    "LayerNorm without weight": _bias_norm,
    "Activation": _activation,
    "GatedActivation silu": _gated("silu"),
    "GatedActivation gelu": _gated("gelu_pytorch_tanh"),
    "GatedActivation relu2": _gated("relu2"),
    "Linear": _linear,
    "Linear transposed": _transposed_linear,
    "QuantizedLinear fp8 block": _quantized("fp8_e4m3fn/block:128x128"),
    "QuantizedLinear fp8 dynamic": _quantized("fp8_e4m3fn/channel", "fp8_e4m3fn/token"),
    "QuantizedLinear int8 dynamic": _quantized("int8/channel", "int8/token"),
    "QuantizedLinear gptq": _quantized("int4.gptq/group:128"),
    "QuantizedLinear awq": _quantized("int4.awq/group:128"),
    "QuantizedLinear compressed-tensors": _quantized("int4.compressed_tensors/group:128"),
    "QuantizedLinear mxfp4": _quantized("mxfp4/group:32"),
    "QuantizedExperts mxfp4": _quantized_experts,
    "GatedMLP": _mlp,
    "Embedding": _embedding,
    "LMHead": _lm_head,
    "RotaryEmbedding": _rotary,
    "Router": _router,
    "Experts": _experts,
    "Attention": _attention(),
    "Attention window": _attention(window=3, softcap=20.0),
    "Attention paged": _paged,
    "LatentAttention": _latent,
    "LatentAttention paged": _paged_latent,
}
