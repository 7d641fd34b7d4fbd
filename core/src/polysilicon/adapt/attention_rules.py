"""Which keys a module's own code lets a query see, far past the length of the probe prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache

from polysilicon.adapt import structure
from polysilicon.adapt.attention import check_mask
from polysilicon.adapt.attention_notes import LEAST, Seen, notes
from polysilicon.adapt.probe import Inputs, Unverified
from polysilicon.adapt.recording import PROMPT, place
from polysilicon.layers.attention import Attention
from polysilicon.ops.attention import visibility

if TYPE_CHECKING:
    from torch import nn

    from polysilicon.adapt.attention_sites import Site
    from polysilicon.adapt.recording import Recording

#: Keys at which a model without a limit, or without a cache, is asked.
_FAR, _FAR_QUERIES = 4096, 512


@dataclass(frozen=True)
class Rule:
    """What the engine may rely on.

    Attributes:
        causal: whether no query of the probe prompts saw its future.
        window: keys that a query sees, itself included; 0 for all.
        reason: why the engine can't rely on it; empty if it can.
    """

    causal: bool
    window: int
    reason: str


def rule_of(module: nn.Module, site: Site, calls: list[Inputs], recording: Recording) -> Rule:
    """The rule of one module by its recorded calls."""
    first = min(calls, key=lambda call: -_queries(call))
    seen = _seen(module, site, without_cache(first))
    shown = seen.visible()
    causal = not bool(shown.triu(1).any())
    if seen.is_biased():
        return Rule(causal, 0, "its scores get a bias, which our paged attention does not take")
    if not causal:
        return Rule(causal, 0, "its attention is not causal")
    try:
        window = _own_window(module, site, calls)
        own = _seen(module, site, without_cache(_stretched(first, PROMPT, PROMPT))).visible()
    except Unverified as failure:
        return Rule(causal, 0, f"what a query sees far away cannot be told: {failure}")
    return Rule(causal, window, _mask_reason(first, shown, own, window, recording))


def _mask_reason(
    call: Inputs, shown: Tensor, own: Tensor, window: int, recording: Recording
) -> str:
    """Why what the call's masks add to the code's own rule can't be relied on."""
    if torch.equal(shown, own):
        return ""
    masks = [value for value in _tensors(call) if place(value) in recording.masks]
    for mask in masks:
        seen = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > LEAST
        if torch.equal(shown, own & seen.cpu()):
            # The window is the code's own: the mask may let all of the past through.
            layer = Attention(1, 1, 1, scale=1.0)
            reason = check_mask(layer, mask, recording)
            if reason and window:
                layer.window = window
                reason = check_mask(layer, mask, recording)
            return reason
    return "its mask was not built by Transformers' mask functions"


def _own_window(module: nn.Module, site: Site, calls: list[Inputs]) -> int:
    """Keys that a query sees at all lengths by the module's own rule; 0 for all.

    Raises:
        Unverified: the rule is not a window, or the code does not run on stretched arguments.
    """
    config: Any = getattr(module, "config", None)
    far = int(getattr(config, "max_position_embeddings", None) or _limit(module) or _FAR)
    base = min(calls, key=_queries)
    if _queries(base) > 1:
        far = min(far, _FAR_QUERIES)
    row = _far_view(module, site, base, far)[-1]
    count = int(row.sum())
    window = 0 if count == far else count
    for keys in {2, PROMPT, window - 1, window + 1, 2 * window + 1, far // 2, far}:
        if 1 < keys <= far:
            found = _far_view(module, site, base, keys)
            queries = found.shape[0]
            expected = visibility(keys - queries, queries, keys, True, window, torch.device("cpu"))
            # Without a mask, code without a rule of its own shows all.
            if not window and found.all():
                continue
            if not torch.equal(found, expected):
                raise Unverified(f"at {keys} keys it is no window of {window or 'all'}")
    return window


def _limit(module: nn.Module) -> int:
    """Largest length for which the module holds a square mask."""
    squares = [x.shape[-1] for x in module.buffers() if x.dim() > 1 and x.shape[-1] == x.shape[-2]]
    return max(squares, default=0)


def _far_view(module: nn.Module, site: Site, base: Inputs, keys: int) -> Tensor:
    """What queries see when the masks of a call let all of `keys` keys through."""
    if _queries(base) > 1:
        return _seen(module, site, without_cache(_stretched(base, PROMPT, keys))).visible()
    return _seen(module, site, _stretched(base, PROMPT + 1, keys)).visible()


def _seen(module: nn.Module, site: Site, call: Inputs) -> Seen:
    return notes(module, site, call, whole=False)[0]


class _FarCache:
    """Stands for Transformers' cache: whatever is put into it, it holds `keys` of them."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The last key and value, as often as there are to be keys."""
        return tuple(
            x[..., -1:, :].expand(*x.shape[:-2], self.keys, x.shape[-1]) for x in (key, value)
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of keys."""
        return self.keys


def _stretched(call: Inputs, length: int, keys: int) -> Inputs:
    """The call with its last key for all of `keys` keys."""

    def stretch(x: Tensor) -> Tensor:
        for dim, size in enumerate(x.shape):
            if size == length:
                shape = (*x.shape[:dim], keys, *x.shape[dim + 1 :])
                x = x.narrow(dim, length - 1, 1).expand(shape)
        return x

    values = tree_map_only(Cache, lambda _: _FarCache(keys), (call.args, call.kwargs))
    args, kwargs = tree_map_only(Tensor, stretch, values)
    return Inputs(args, kwargs)


def without_cache(call: Inputs) -> Inputs:
    """The call as if no cache were used."""

    def drop(value: Any) -> Any:
        return None if isinstance(value, (Cache, _FarCache)) else value

    kwargs = {name: drop(value) for name, value in call.kwargs.items()}
    return Inputs(tuple(drop(value) for value in call.args), kwargs)


def _queries(call: Inputs) -> int:
    hidden = structure.first_tensor(call)
    assert hidden is not None
    return hidden.shape[1]


def _tensors(call: Inputs) -> list[Tensor]:
    return [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
