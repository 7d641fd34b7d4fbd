"""Recognises RMS norms, layer norms and gated RMS norms."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.adapt import structure
from polysilicon.adapt.probe import Inputs, Unverified, call, first_verified, tensors, verify
from polysilicon.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from polysilicon.adapt.structure import Candidate
    from polysilicon.layers.base import Layer

    Attempt = Callable[[], tuple[Layer, float]]


class UnitNorm(RMSNorm):
    """x divided by its length: an RMS norm over the root of the number of channels."""

    def __init__(self, hidden: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__(None, eps / hidden, hidden=hidden, dtype=dtype)
        self.factor = hidden**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → the same shape and dtype."""
        y: Tensor = super().forward(x) * self.factor
        return y

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x + residual divided by its length, x + residual)."""
        y, total = super().forward_add(x, residual)
        return y * self.factor, total


def may_be_norm(candidate: Candidate) -> bool:
    """A leaf with at most one weight and one bias, both vectors of the same length."""
    module = candidate.module
    own = structure.parameters(module)
    # A buffer that no checkpoint holds is a constant, which the proof covers.
    stored = structure.buffers(module).keys() - module._non_persistent_buffers_set
    if not structure.is_leaf(module) or stored or len(own) > 2:
        return False
    if not own:
        return "norm" in candidate.name.lower()
    return all(value.dim() == 1 for value in own.values()) and len(_lengths(own)) == 1


def _lengths(own: dict[str, nn.Parameter]) -> set[int]:
    return {value.shape[0] for value in own.values()}


def recognise_norm(candidate: Candidate) -> tuple[Layer, float]:
    """Our norm that computes what the module does, and the error measured.

    Raises:
        Unverified: no hypothesis reproduced it.
    """
    own = list(structure.parameters(candidate.module).values())
    weight = own[0] if own else None
    bias = own[1] if len(own) == 2 else None
    width = _width(candidate, weight)
    like = torch.empty(0, dtype=candidate.dtype, device=_device(candidate, weight))
    if _takes_gate(candidate):
        attempts = _gated(candidate, weight, width, like)
    else:
        attempts = _plain(candidate, weight, bias, width, like)
    return first_verified(attempts, "it takes other arguments than a norm")


def _width(candidate: Candidate, weight: Tensor | None) -> int:
    if weight is not None:
        return weight.shape[0]
    seen = structure.first_tensor(candidate.call)
    if seen is None:
        raise Unverified("it has no weight and the probe prompt did not reach it")
    return seen.shape[-1]


def _device(candidate: Candidate, weight: Tensor | None) -> torch.device:
    seen = weight if weight is not None else structure.first_tensor(candidate.call)
    assert seen is not None
    return seen.device


def _takes_gate(candidate: Candidate) -> bool:
    recorded = candidate.call
    if recorded is None:
        return structure.required_arguments(candidate.module) == 2
    values = (*recorded.args, *recorded.kwargs.values())
    return sum(isinstance(value, torch.Tensor) for value in values) == 2


def _plain(
    candidate: Candidate, weight: Tensor | None, bias: Tensor | None, width: int, like: Tensor
) -> Iterator[Attempt]:
    probes = [call(x) for x in tensors(width, like)]
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    for eps, offset in itertools.product(structure.small_numbers(candidate.module), offsets):
        sizes: dict[str, Any] = {"hidden": width, "dtype": candidate.dtype}
        layers: list[Layer] = [LayerNorm(weight, bias, eps, offset, **sizes)]
        if bias is None:
            layers.insert(0, RMSNorm(weight, eps, offset, **sizes))
        if weight is None and bias is None:
            layers.append(UnitNorm(width, eps, dtype=candidate.dtype))
        for layer in layers:
            yield _attempt(candidate, layer, probes, width)


def _gated(
    candidate: Candidate, weight: Tensor | None, width: int, like: Tensor
) -> Iterator[Attempt]:
    gates = list(tensors(width, like))
    probes = [call(x, gate.flip(-1)) for x, gate in zip(tensors(width, like), gates, strict=True)]
    sizes = [int(n) for n in structure.numbers(candidate.module) if n >= 1 and width % n == 0]
    groups = list(dict.fromkeys([*sizes, *(width // n for n in sizes), width]))
    for group, before, eps, offset in itertools.product(
        groups, (False, True), structure.small_numbers(candidate.module), (0.0, 1.0)
    ):
        layer = GatedRMSNorm(
            weight,
            eps,
            offset,
            norm_before_gate=before,
            group_size=group,
            hidden=width,
            dtype=candidate.dtype,
        )
        yield _attempt(candidate, layer, probes, width)


def _attempt(candidate: Candidate, layer: Layer, probes: list[Inputs], width: int) -> Attempt:
    def attempt() -> tuple[Layer, float]:
        error = verify(candidate.module, layer, probes, dtype=candidate.dtype, reduction=width)
        return layer, error

    return attempt
