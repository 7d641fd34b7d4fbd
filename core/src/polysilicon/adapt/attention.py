"""Attention modules that call Transformers' attention interface get our layer behind it."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt.interface import AttentionCall, run_layer
from polysilicon.adapt.probe import MAGNITUDES, Inputs, Unverified, call, generator, verify
from polysilicon.adapt.recording import place
from polysilicon.layers.attention import Attention, PagedContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from polysilicon.adapt.recording import Recording

#: Arguments of the interface that the layer takes over.
_TAKEN = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal"})

#: Arguments that change nothing on the dense path, or that belong to other implementations.
_IGNORED = frozenset(
    {"dropout", "position_ids", "use_cache", "cache", "past_key_values", "output_attentions"}
    | {"output_hidden_states", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"}
    | {"max_length_k", "cu_seqlens", "position_embeddings", "deterministic", "cache_position"}
    | {"output_router_logits", "logits_to_keep", "layer_idx", "hidden_states", "labels"}
)


@dataclass(frozen=True)
class AttentionFacts:
    """What the recorded calls of one module say about its attention."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    causal: bool


def attention_facts(module: nn.Module, calls: list[AttentionCall]) -> AttentionFacts:
    """The facts, the same for every recorded call.

    Raises:
        Unverified: an argument that our layer does not take, or that changes between calls.
    """
    found = [_facts_of(module, one) for one in calls]
    for other in found[1:]:
        if _comparable(other) != _comparable(found[0]):
            raise Unverified("its arguments change from call to call")
    return found[0]


def _facts_of(module: nn.Module, one: AttentionCall) -> AttentionFacts:
    kwargs = {name: value for name, value in one.kwargs.items() if value is not None}
    strange = sorted(kwargs.keys() - _TAKEN - _IGNORED)
    if strange:
        raise Unverified(f"it passes {', '.join(strange)}, which our attention does not take")
    scale = kwargs.get("scaling", one.query.shape[-1] ** -0.5)
    softcap, window = kwargs.get("softcap", 0.0), kwargs.get("sliding_window", 0)
    if not all(isinstance(value, (int, float)) for value in (scale, softcap, window)):
        raise Unverified("its scale, softcap or window is not a plain number")
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    return AttentionFacts(
        heads=one.query.shape[1],
        kv_heads=one.key.shape[1],
        head_dim=one.query.shape[-1],
        v_head_dim=one.value.shape[-1],
        scale=float(scale),
        window=int(window),
        softcap=float(softcap),
        sinks=kwargs.get("s_aux"),
        causal=bool(causal),
    )


def _comparable(facts: AttentionFacts) -> tuple[Any, ...]:
    return tuple(id(v) if isinstance(v, Tensor) else v for v in vars(facts).values())


def build_attention(
    module: nn.Module,
    calls: list[AttentionCall],
    original: Callable[..., Any],
    context: PagedContext,
    name: str,
) -> tuple[Attention, float]:
    """Our layer for one module, proved against the function that it called, and the error.

    Raises:
        Unverified: the facts cannot be told, or the results differ.
    """
    facts = attention_facts(module, calls)
    dtype = calls[0].query.dtype
    try:
        layer = Attention(
            facts.heads,
            facts.kv_heads,
            facts.head_dim,
            facts.v_head_dim,
            scale=facts.scale,
            window=facts.window,
            softcap=facts.softcap,
            sinks=facts.sinks,
            causal=facts.causal,
            name=name,
            dtype=dtype,
            context=context,
        )
    except ValueError as refusal:
        raise Unverified(str(refusal)) from refusal
    kwargs = calls[0].kwargs

    def theirs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = original(module, q, k, v, mask, **kwargs)[0]
        return out

    def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return run_layer(layer, q, k, v, mask)

    probes = list(_probes(facts, calls[0]))
    error = verify(theirs, ours, probes, dtype=dtype, reduction=4 * facts.head_dim)
    return layer, error


def _probes(facts: AttentionFacts, seen: AttentionCall) -> Iterator[Inputs]:
    """Prefill, chunk and decode, with and without padding; the mask carries the window."""
    source = generator()

    def normal(heads: int, length: int, size: int, magnitude: float) -> Tensor:
        x = torch.randn(2, heads, length, size, generator=source) * magnitude
        return x.to(seen.query.device, seen.query.dtype)

    as_bool = seen.mask is None or seen.mask.dtype == torch.bool
    for queries, keys in ((7, 7), (1, 12), (3, 12)):
        for magnitude in MAGNITUDES:
            # Keys shrink as queries grow: the exponential would turn the rounding of a large score
            # into a large error of either side.
            q = normal(facts.heads, queries, facts.head_dim, magnitude)
            k = normal(facts.kv_heads, keys, facts.head_dim, min(1.0, 1 / magnitude))
            v = normal(facts.kv_heads, keys, facts.v_head_dim, magnitude)
            for window in (0, 4):
                mask = _mask(queries, keys, window, facts.causal).to(q.device)
                yield call(q, k, v, mask if as_bool else _additive(mask, q.dtype))


def _mask(queries: int, keys: int, window: int, causal: bool) -> Tensor:
    """[2, 1, queries, keys]; the second row is padded on the left, but sees at least itself."""
    position = torch.arange(keys - queries, keys)[:, None]
    distance = position - torch.arange(keys)[None]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        seen = seen & (distance.abs() < window)
    padded = seen & ((torch.arange(keys) >= 2)[None] | (distance == 0))
    return torch.stack([seen, padded])[:, None]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)


def check_mask(layer: Attention, mask: Tensor | None, recording: Recording) -> str:
    """Why the engine cannot rely on the layer's own rule (causal and window); empty if it can.

    Transformers builds a mask from a function of (batch, head, query, key) positions. It is asked
    about queries far past the window, without building a mask of that length.
    """
    if not layer.causal:
        return "its attention is not causal"
    if mask is None:
        return "" if not layer.window else "no mask shows whether its window is applied"
    found = recording.masks.get(place(mask))
    if found is None:
        return "its mask was not built by Transformers' mask functions"
    for query in (1, max(2, layer.window - 1), layer.window + 3, 2 * layer.window + 70):
        theirs = _visible(found[1], query)
        distance = query - torch.arange(query + 3)
        ours = distance >= 0
        if layer.window:
            ours = ours & (distance < layer.window)
        if theirs is None or not torch.equal(theirs, ours):
            return f"its mask lets other keys through than a window of {layer.window or 'all'}"
    return ""


def _visible(function: Callable[..., Any], query: int) -> Tensor | None:
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(query + 3)
    try:
        longer = _continued(function, query + 3)
        seen = torch.as_tensor(longer(zero, zero, torch.tensor(query), keys))
    # A mask function that reads tensors of the probe's length in another way fails past it.
    except (IndexError, RuntimeError):
        return None
    return seen.expand(keys.shape)


def _continued(value: Any, length: int) -> Any:
    """A mask function as if the tensors that it closes over, one entry a token, went on."""
    if isinstance(value, Tensor) and value.dim() > 1 and 1 < value.shape[-1] < length:
        more = value[..., -1:].expand(*value.shape[:-1], length - value.shape[-1])
        return torch.cat([value, more], dim=-1)
    if isinstance(value, tuple):
        return tuple(_continued(part, length) for part in value)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = [types.CellType(_continued(c.cell_contents, length)) for c in value.__closure__]
    return types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
