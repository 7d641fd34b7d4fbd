"""Recognises modules that turn positions into (cos, sin)."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from polysilicon.adapt import structure
from polysilicon.adapt.probe import Inputs, call, first_verified, generator, verify
from polysilicon.layers.base import Layer
from polysilicon.layers.rotary import Output, RotaryEmbedding
from polysilicon.layers.rotary_scaling import RULES, RotaryFrequencies, frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from polysilicon.adapt.structure import Candidate
    from polysilicon.records import Problem

#: How cos and sin are handed on; `swapped` is sin first.
Result = Literal["pair", "float32", "complex", "swapped"]

#: Of the original paper, for modules whose table was filled before anything named the base.
_USUAL_BASE = 10000.0

_SUFFIX = "inv_freq"
_OUTPUTS: tuple[Output, ...] = ("duplicated", "repeated", "half")


class RotaryByLayerType(Layer):
    """Rotary embeddings of a model whose layer types turn at different speeds.

    Args:
        kinds: layer type → its rotary embedding; the key "" serves calls that name no type.
        result: cos and sin in the dtype of the activations, or always in float32, as one complex
            number, or with sin first.
    """

    def __init__(self, kinds: Mapping[str, RotaryEmbedding], result: Result) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({name or "any": layer for name, layer in kinds.items()})
        self.result = result

    def problems(self) -> dict[str, Problem]:
        """None of its own: the embeddings that it is made of state theirs."""
        return {}

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """int64 [batch, tokens] → cos, sin of the layer type."""
        like = x if self.result in ("pair", "swapped") else x.new_empty(0, dtype=torch.float32)
        cos, sin = self.kinds[layer_type or "any"](like, position_ids)
        if self.result == "complex":
            return torch.complex(cos, sin)
        return (sin, cos) if self.result == "swapped" else (cos, sin)


def may_be_rotary(candidate: Candidate) -> bool:
    """A leaf without weights that holds inverse frequencies, or a table of sines by position."""
    module = candidate.module
    if not structure.is_leaf(module) or structure.parameters(module):
        return False
    return bool(_prefixes(module)) or _table(candidate) is not None


def _table(candidate: Candidate) -> Tensor | None:
    """The only buffer, if it has two dims and the module answers positions with a pair."""
    held = list(structure.buffers(candidate.module).values())
    output = None if candidate.call is None else candidate.call.output
    pair = isinstance(output, tuple) and len(output) == 2
    return held[0] if pair and len(held) == 1 and held[0].dim() == 2 else None


def _prefixes(module: nn.Module) -> list[str]:
    return [
        name.removesuffix(_SUFFIX)
        for name in structure.buffers(module)
        if name.endswith(_SUFFIX) and "original" not in name
    ]


def recognise_rotary(candidate: Candidate) -> tuple[Layer, float]:
    """Our rotary embedding that yields the same cos and sin, and the error measured.

    Raises:
        Unverified: no rule and form reproduced the module.
    """
    kinds: dict[str, RotaryEmbedding] = {}
    worst: float = 0.0
    result: Result = "pair"
    for prefix in _prefixes(candidate.module) or [""]:
        layer_type = prefix.removesuffix("_")
        (kinds[layer_type], result), error = _one(candidate, prefix, layer_type)
        worst = max(worst, error)
    if list(kinds) == [""] and result == "pair":
        return kinds[""], worst
    return RotaryByLayerType(kinds, result), worst


def _one(
    candidate: Candidate, prefix: str, layer_type: str
) -> tuple[tuple[RotaryEmbedding, Result], float]:
    module = candidate.module
    probes = _probes(candidate, layer_type)

    def attempt(layer: RotaryEmbedding, result: Result) -> tuple[Any, float]:
        ours = RotaryByLayerType({layer_type: layer}, result)
        with unchanged(module):
            error = verify(module, ours, probes, dtype=candidate.dtype)
        return (layer, result), error

    forms = itertools.product(
        list(_rules(candidate, prefix, layer_type)), _sections(module, layer_type), _OUTPUTS
    )
    results: tuple[Result, ...] = ("pair", "float32", "complex", "swapped")
    attempts: list[Callable[[], tuple[Any, float]]] = []
    for rule, (sections, mixed), output in forms:
        try:
            layer = RotaryEmbedding(
                rule,
                output=output,
                sections=sections,
                sections_interleaved=mixed,
                dtype=candidate.dtype,
            )
        except ValueError:
            continue
        attempts += [partial(attempt, layer, result) for result in results]
    return first_verified(attempts, "its sections do not fit its frequencies")


def _rules(candidate: Candidate, prefix: str, layer_type: str) -> Iterator[RotaryFrequencies]:
    """The frequencies that it holds, or those that its config's parameters describe."""
    module, table = candidate.module, _table(candidate)
    if table is not None:
        given = {"rope_theta": _USUAL_BASE, **_rope_parameters(module, layer_type)}
        yield frequencies(given, head_size=table.shape[1], max_positions=table.shape[0])
        return
    held = structure.buffers(module)[f"{prefix}{_SUFFIX}"]
    scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
    parameters = _rope_parameters(module, layer_type)
    kind = parameters.get("rope_type") or "default"
    if kind not in ("dynamic", "longrope"):
        yield RotaryFrequencies(inv_freq=held.float(), scaling=float(scaling))
        return
    config: Any = getattr(module, "config", None)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for head_size in dict.fromkeys([size, 2 * held.shape[-1]]):
        if kind in RULES:
            given = {"original_max_position_embeddings": None, **vars(config), **parameters}
            yield frequencies(
                given, head_size=head_size, max_positions=config.max_position_embeddings
            )


def _rope_parameters(module: nn.Module, layer_type: str) -> Mapping[str, Any]:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    nested = parameters.get(layer_type) if layer_type else None
    return nested if isinstance(nested, dict) else parameters


def _sections(module: nn.Module, layer_type: str) -> list[tuple[Sequence[int], bool]]:
    parameters = _rope_parameters(module, layer_type)
    found = parameters.get("mrope_section") or getattr(module, "mrope_section", None)
    if isinstance(found, dict):
        found = found.get(layer_type)
    if not found:
        return [((), False)]
    return [(list(found), False), (list(found), True), ((), False)]


def _probes(candidate: Candidate, layer_type: str) -> list[Inputs]:
    """Short positions, then some past every threshold that the config names, rising."""
    seen = structure.first_tensor(candidate.call)
    device = seen.device if seen is not None else torch.device("cpu")
    x = torch.zeros(2, 6, 8, dtype=candidate.dtype, device=device)
    probes = []
    table = _table(candidate)
    reaches = _thresholds(candidate.module) if table is None else [table.shape[0] - 6]
    for reach in [0, *reaches]:
        for positions in _positions(candidate, reach, device):
            kwargs = {"position_ids": positions}
            if layer_type:
                kwargs["layer_type"] = layer_type  # type: ignore[assignment]
            probes.append(call(x, **kwargs))
    return probes


def _thresholds(module: nn.Module) -> list[int]:
    config = getattr(module, "config", None)
    places = [vars(config) if config is not None else {}, vars(module)]
    for parameters in list(places[0].values()):
        if isinstance(parameters, dict):
            places += [parameters, *(p for p in parameters.values() if isinstance(p, dict))]
    names = ("max_position_embeddings", "original_max_position_embeddings", "original_max_seq_len")
    found = {place.get(name) for place in places for name in names}
    return sorted(n for n in found if isinstance(n, int))


def _positions(candidate: Candidate, reach: int, device: torch.device) -> list[Tensor]:
    plain = torch.arange(6) + reach
    flat = torch.stack([plain, plain.flip(0)]).to(device)
    axes = _axes(candidate)
    if not axes:
        return [flat]
    spread = torch.randint(reach + 7, (axes, 2, 6), generator=generator()).to(device)
    return [spread, flat[None].expand(axes, -1, -1)]


def _axes(candidate: Candidate) -> int:
    if candidate.call is None:
        return 0
    values = (*candidate.call.args, *candidate.call.kwargs.values())
    whole = [v for v in values if isinstance(v, Tensor) and not v.is_floating_point()]
    return whole[0].shape[0] if whole and whole[0].dim() == 3 else 0


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restores buffers and plain attributes: dynamic scalings keep the longest length seen."""
    own = dict(vars(module))
    held = dict(module._buffers.items())
    copies = {name: value.clone() for name, value in held.items() if value is not None}
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(own)
        for name, value in held.items():
            module._buffers[name] = value
            if value is not None:
                value.copy_(copies[name])
        for name in set(module._buffers) - set(held):
            del module._buffers[name]
