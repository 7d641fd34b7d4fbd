"""Which weights of a model can lie packed, and why the others stay plain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from polysilicon.layers.base import Layer
from polysilicon.layers.packed_weight import PackedParameter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class Weights:
    """The Parameters of a model: who holds them, and which share memory."""

    def __init__(self, model: nn.Module) -> None:
        self._shared = _shared(model)
        groups = [parts for layer in model.modules() for parts in _weights(layer)]
        self._merged = {id(part) for parts in groups if len(parts) > 1 for part in parts}

    def plain(self, layer: Layer, attribute: str, arguments: Mapping[str, str]) -> dict[str, str]:
        """Argument → why this layer can't hold it packed; empty where it can hold all of them.

        Args:
            layer: one of the model's.
            attribute: its op slot.
            arguments: those of the op that have a layout role.
        """
        held = layer.weights(attribute)
        found = {}
        for argument in arguments:
            reason = (
                self._reason(held[argument])
                if argument in held
                else f"{type(layer).__name__} keeps it plain"
            )
            if reason is not None:
                found[argument] = reason
        return found

    def _reason(self, parts: Sequence[Tensor]) -> str | None:
        for part in parts:
            if type(part) not in (nn.Parameter, PackedParameter):
                return f"it is a {type(part).__name__}, and only a plain Parameter is packed"
            if id(part) in self._shared:
                return f"it is shared: {self._shared[id(part)]}"
            if len(parts) == 1 and id(part) in self._merged:
                return "its rows lie in a merged product"
        return None


def _weights(layer: nn.Module) -> list[tuple[Tensor, ...]]:
    if not isinstance(layer, Layer):
        return []
    return [parts for slot in layer.problems() for parts in layer.weights(slot).values()]


def _shared(model: nn.Module) -> dict[int, str]:
    """id of each Parameter that another place of the model sees too → the places."""
    places: dict[int, list[str]] = {}
    spans: list[tuple[int, int, int]] = []
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            known = places.setdefault(id(tensor), [])
            known.append(f"{path}.{name}".lstrip("."))
            if len(known) == 1 and tensor.numel() and not isinstance(tensor, PackedParameter):
                spans.append((*_span(tensor), id(tensor)))
    shared = {key: " and ".join(known) for key, known in places.items() if len(known) > 1}
    spans.sort()
    end, last = 0, 0
    for start, stop, key in spans:
        if start < end:
            both = f"{places[last][0]} and {places[key][0]} lie in the same memory"
            shared.setdefault(last, both)
            shared.setdefault(key, both)
        if stop > end:
            end, last = stop, key
    return shared


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address and the one after the last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()
