"""Recognises gated MLPs: down(act(gate(x)) * up(x)), with gate and up apart or merged."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from polysilicon.adapt import structure
from polysilicon.adapt.probe import call, first_verified, tensors, verify
from polysilicon.layers.activation import Activation, GatedActivation
from polysilicon.layers.base import Layer
from polysilicon.layers.linear import Linear
from polysilicon.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from polysilicon.adapt.structure import Candidate
    from polysilicon.records import Problem

    Attempt = Callable[[], tuple[Layer, float]]

#: Tried where the activation is written into the code instead of being a child.
_USUAL = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")


class FusedGatedMLP(Layer):
    """A gated MLP whose checkpoint holds gate and up as one matrix, gate first.

    Args:
        gate_up: [2 · width, hidden].
        down: [hidden, width].
        kind: activation of the gate.
        names: attribute names of the two linears, which are the parameter names of the model.
    """

    def __init__(self, gate_up: Linear, down: Linear, kind: str, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        self.add_module(names[0], gate_up)
        self.add_module(names[1], down)
        width = gate_up.out_features // 2
        self.gated = GatedActivation(kind, width=width, dtype=gate_up.weight.dtype)

    def problems(self) -> dict[str, Problem]:
        """None of its own: the layers that it is made of state theirs."""
        return {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., hidden]."""
        merged = getattr(self, self.names[0])(x)
        y: torch.Tensor = getattr(self, self.names[1])(self.gated(merged))
        return y


def may_be_gated_mlp(candidate: Candidate) -> bool:
    """Two or three linears, perhaps one activation, nothing with weights besides."""
    module = candidate.module
    if structure.parameters(module) or structure.buffers(module):
        return False
    linears = _linears(module)
    others = [child for child in module.children() if child not in linears.values()]
    if len(linears) not in (2, 3) or structure.required_arguments(module) != 1:
        return False
    return not any(True for child in others for _ in child.parameters())


def _linears(module: nn.Module) -> dict[str, Linear]:
    return {name: c for name, c in module.named_children() if type(c) is Linear}


def recognise_gated_mlp(candidate: Candidate) -> tuple[Layer, float]:
    """Our gated MLP over the same (already adapted) linears, and the error measured.

    Raises:
        Unverified: no order of the linears and no activation reproduced the module.
    """
    linears = _linears(candidate.module)
    attempts = _three(candidate, linears) if len(linears) == 3 else _two(candidate, linears)
    return first_verified(attempts, "the shapes of its linears are not those of a gated MLP")


def _kinds(module: nn.Module) -> list[str]:
    own = [c.kind for c in module.children() if isinstance(c, Activation)]
    return own or list(_USUAL)


def _three(candidate: Candidate, linears: dict[str, Linear]) -> Iterator[Attempt]:
    names = list(linears)
    for down in reversed(names):
        gate, up = (name for name in names if name != down)
        parts = linears[gate], linears[up], linears[down]
        if any(part.transposed for part in parts):
            continue
        if not parts[0].weight.shape == parts[1].weight.shape == parts[2].weight.t().shape:
            continue
        for order in ((gate, up, down), (up, gate, down)):
            for kind in _kinds(candidate.module):
                yield _attempt(candidate, linears, order, kind)


def _attempt(
    candidate: Candidate, linears: dict[str, Linear], names: tuple[str, str, str], kind: str
) -> Attempt:
    gate, up, down = (linears[name] for name in names)

    def attempt() -> tuple[Layer, float]:
        # The arithmetic is proved first; merging moves the weights' memory.
        _check(candidate, lambda x: down(Activation(kind)(gate(x)) * up(x)), gate)
        layer = GatedMLP(gate, up, down, kind, names=names)
        return layer, _check(candidate, layer, gate)

    return attempt


def _two(candidate: Candidate, linears: dict[str, Linear]) -> Iterator[Attempt]:
    for first, second in (tuple(linears), tuple(reversed(linears))):
        merged, down = linears[first], linears[second]
        if merged.out_features != 2 * down.in_features or merged.transposed or down.transposed:
            continue
        for kind in _kinds(candidate.module):
            layer = FusedGatedMLP(merged, down, kind, (first, second))
            yield partial(_attempt_fused, candidate, layer, merged)


def _attempt_fused(candidate: Candidate, layer: Layer, merged: Linear) -> tuple[Layer, float]:
    return layer, _check(candidate, layer, merged)


def _check(
    candidate: Candidate, replacement: Callable[[torch.Tensor], torch.Tensor], first: Linear
) -> float:
    weight = first.weight
    return verify(
        candidate.module,
        replacement,
        (call(x) for x in tensors(weight.shape[1], weight)),
        dtype=weight.dtype,
        # Three sums follow one another; the longest is over the width in between.
        reduction=4 * max(weight.shape),
    )
