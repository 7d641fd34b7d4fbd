"""Recognises linear layers (also with transposed weights) and embedding tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polysilicon.adapt import structure
from polysilicon.adapt.positions import recognise_positions
from polysilicon.adapt.probe import Unverified, call, first_verified, generator, tensors, verify
from polysilicon.layers.embedding import Embedding
from polysilicon.layers.linear import Linear
from polysilicon.layers.lm_head import LMHead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from polysilicon.adapt.structure import Candidate
    from polysilicon.layers.base import Layer

#: Rows of a table that are looked up besides the first and the last.
_SAMPLE = 61


def has_matrix(candidate: Candidate) -> bool:
    """A leaf with one matrix called weight, and at most a bias vector beside it."""
    own = structure.parameters(candidate.module)
    if not structure.is_leaf(candidate.module) or not own.keys() <= {"weight", "bias"}:
        return False
    return "weight" in own and own["weight"].dim() == 2


def may_be_embedding(candidate: Candidate) -> bool:
    """Has a matrix alone, and was called with whole numbers (or looks like a table)."""
    if not has_matrix(candidate) or "bias" in structure.parameters(candidate.module):
        return False
    seen = structure.first_tensor(candidate.call)
    if seen is not None:
        return not seen.is_floating_point()
    return hasattr(candidate.module, "num_embeddings")


def recognise_linear(candidate: Candidate, *, head: bool = False) -> tuple[Layer, float]:
    """Our linear layer over the same weight, and the error measured.

    Raises:
        Unverified: neither it nor its transposed form reproduced the module.
    """
    own = structure.parameters(candidate.module)
    weight, bias = own["weight"], own.get("bias")

    def layers() -> Iterator[Callable[[], tuple[Layer, float]]]:
        for transposed in (False, True):
            width, out = weight.shape if transposed else reversed(weight.shape)
            if bias is not None and bias.shape != (out,):
                continue
            if head and not transposed:
                yield lambda: _verified(candidate, LMHead(weight, bias), weight.shape[1])
            yield _linear(candidate, weight, bias, transposed, width)

    return first_verified(layers(), "weight and bias do not fit together as in a linear layer")


def _linear(
    candidate: Candidate,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    transposed: bool,
    width: int,
) -> Callable[[], tuple[Layer, float]]:
    return lambda: _verified(candidate, Linear(weight, bias, transposed=transposed), width)


def _verified(candidate: Candidate, layer: Layer, width: int) -> tuple[Layer, float]:
    weight: Tensor = candidate.module.get_parameter("weight")
    probes = (call(x) for x in tensors(width, weight))
    return layer, verify(candidate.module, layer, probes, dtype=weight.dtype, reduction=width)


def recognise_embedding(candidate: Candidate) -> tuple[Layer, float]:
    """Our table over the same weight, and the error measured.

    Raises:
        Unverified: no scale or offset reproduced the module.
    """
    try:
        return _plain_table(candidate)
    except Unverified as plain:
        try:
            return recognise_positions(candidate)
        except Unverified:
            raise plain from None


def _plain_table(candidate: Candidate) -> tuple[Layer, float]:
    module = candidate.module
    weight = structure.parameters(module)["weight"]
    if getattr(module, "max_norm", None) is not None:
        raise Unverified("its look-up changes the table (max_norm)")
    found: tuple[Layer, float] | None = None
    reason = "no scale that it holds reproduces it"
    for scale in _scales(module, weight.dtype):
        for offset in _offsets(module, weight.shape[0]):
            layer = Embedding(weight, scale, offset)
            probes = [call(ids) for ids in _ids(weight, weight.shape[0] - offset)]
            try:
                error = verify(module, layer, probes, dtype=weight.dtype)
            except Unverified as failure:
                reason = str(failure) if found is None else reason
                continue
            if found is None or error < found[1]:
                found = layer, error
            if error == 0.0:
                return found
    if found is None:
        raise Unverified(reason)
    return found


def _scales(module: nn.Module, dtype: torch.dtype) -> list[float]:
    own = structure.numbers(module)
    rounded = [float(torch.tensor(value, dtype=dtype)) for value in own]
    return list(dict.fromkeys([1.0, *rounded, *own]))


def _offsets(module: nn.Module, rows: int) -> list[int]:
    own = [int(n) for n in structure.numbers(module) if 0 < n < min(8, rows) and n == int(n)]
    return list(dict.fromkeys([0, *own]))


def _ids(weight: Tensor, rows: int) -> list[Tensor]:
    picks = torch.randint(rows, (_SAMPLE,), generator=generator())
    picks = torch.cat([picks, torch.tensor([0, rows - 1])]).to(weight.device)
    return [picks[-1:].view(1, 1), picks.view(1, -1), picks[:60].view(2, 30)]
