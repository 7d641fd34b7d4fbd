"""Recognises mixtures that run every expert over all tokens, and their routers (Llama 4)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt import structure
from polysilicon.adapt.experts import past_limits, positive, stack_forms
from polysilicon.adapt.probe import (
    Inputs,
    Unverified,
    answers,
    call,
    first_verified,
    generator,
    verify_answers,
)
from polysilicon.layers.experts import Experts
from polysilicon.layers.router import Router
from polysilicon.ops.moe_router import AFTER, SCORINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.adapt.structure import Candidate
    from polysilicon.layers.base import Layer

_SIZES = (1e-2, 1.0, 10.0)

#: Past this a sigmoid is one for many experts: what chooses by scores chooses otherwise then.
_SATURATING = 1e3
_TOKENS = 24


class ScoresLike(Router):
    """A router that gives (scores, logits), both [T, E]: zero for every expert not chosen."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # no correction is passed
        """[..., hidden] → scores and logits in the dtype of the logits."""
        logits, weights, indices = super().forward(x)
        return torch.zeros_like(logits).scatter(-1, indices, weights.to(logits.dtype)), logits


class EqualShares(Experts):
    """Experts whose rows come sorted: the first of E equal parts goes to the first expert."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # rows alone
        """[E · T, H] → [E · T, H]; ValueError for rows that E does not divide."""
        number = len(self._stacked()[1])
        share, rest = divmod(len(x), number)
        if rest:
            raise ValueError(
                f"EqualShares: got {len(x)} rows for {number} experts: expected as many for each"
            )
        indices = torch.arange(number, device=x.device).repeat_interleave(share)
        return super().forward(x, indices[:, None], x.new_ones(len(x), 1))


def may_be_scores(candidate: Candidate) -> bool:
    """A leaf with one matrix [E, H] and a recorded result of scores and logits [T, E]."""
    own, seen = structure.parameters(candidate.module), candidate.call
    if seen is None or not structure.is_leaf(candidate.module) or len(own) != 1:
        return False
    (weight,) = own.values()
    output = seen.output
    if weight.dim() != 2 or not isinstance(output, tuple) or len(output) != 2:
        return False
    if structure.buffers(candidate.module) or len((*seen.args, *seen.kwargs)) != 1:
        return False
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 2 for x in output):
        return False
    return all(x.shape[1] == len(weight) for x in output) and 0 < _chosen(output[0]) < len(weight)


def _chosen(scores: Tensor) -> int:
    """How many experts the first token has a score for."""
    return int((scores[:1] != 0).sum())


def recognise_scores(candidate: Candidate) -> tuple[Layer, float]:
    """Our router over the module's own weights, and the error measured.

    Raises:
        Unverified: no way to score and to choose reproduced it.
    """
    ((name, weight),) = structure.parameters(candidate.module).items()
    assert candidate.call is not None  # may_be_scores was asked
    source = generator(3)
    probes = [
        call((torch.randn(_TOKENS, weight.shape[1], generator=source) * size).to(candidate.dtype))
        for size in (*_SIZES, _SATURATING)
    ]
    probes = [call(probe.args[0].to(weight.device)) for probe in probes]
    theirs = answers(candidate.module, probes)
    scales = dict.fromkeys([1.0, *positive(candidate.module)])
    attempts = [
        partial(
            _scored,
            {
                "top_k": _chosen(candidate.call.output[0]),
                "scoring": scoring,
                "renormalize": renormalize,
                "scale": scale,
                "names": (name, "bias_", "correction_"),
            },
            weight,
            probes,
            theirs,
            candidate.dtype,
        )
        # First those that choose by the logits: their choice is the same where no score ties.
        for scoring, renormalize, scale in itertools.product(
            dict.fromkeys([*AFTER, *SCORINGS]), (False, True), scales
        )
    ]
    return first_verified(attempts, "none of the ways to score experts that we know fits it")


def _scored(
    settings: dict[str, Any],
    weight: Tensor,
    probes: list[Inputs],
    theirs: list[Any],
    dtype: torch.dtype,
) -> tuple[Layer, float]:
    layer = ScoresLike(weight, **settings).eval()
    return layer, verify_answers(theirs, layer, probes, dtype=dtype, reduction=4 * weight.shape[1])


def may_be_shares(candidate: Candidate) -> bool:
    """Two stacks of matrices, and a recorded call with rows alone, as many for every expert."""
    own, seen = structure.parameters(candidate.module), candidate.call
    if seen is None or len(own) != 2 or any(value.dim() != 3 for value in own.values()):
        return False
    if any(True for child in candidate.module.children() for _ in child.parameters()):
        return False
    values = (*seen.args, *seen.kwargs.values())
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].dim() != 2:
        return False
    alike = isinstance(seen.output, Tensor) and seen.output.shape == values[0].shape
    return alike and len(values[0]) % len(next(iter(own.values()))) == 0


def recognise_shares(candidate: Candidate) -> tuple[Layer, float]:
    """Our experts over the module's own weights, and the error measured.

    Raises:
        Unverified: no reading of its weights and no activation reproduced it.
    """
    seen = structure.first_tensor(candidate.call)
    assert seen is not None  # may_be_shares was asked
    attempts = [
        partial(_shared, candidate, form)
        for form in stack_forms(candidate.module, seen.shape[1], top_k=1)
    ]
    return first_verified(attempts, "the shapes of its weights are not those of experts")


def _shared(candidate: Candidate, form: dict[str, Any]) -> tuple[Layer, float]:
    given = dict(form)
    tensors = given.pop("tensors")
    try:
        layer = EqualShares(*tensors, **given).eval()
    except (TypeError, ValueError) as refusal:
        raise Unverified(str(refusal)) from refusal
    probes = list(_probes(candidate, tensors[0]))
    theirs = answers(candidate.module, probes)
    width = max(tensors[0].shape[1:])
    return layer, verify_answers(theirs, layer, probes, dtype=candidate.dtype, reduction=8 * width)


def _probes(candidate: Candidate, up: Tensor) -> Iterator[Inputs]:
    """Rows of every size for each expert, and one row for each."""
    seen = structure.first_tensor(candidate.call)
    assert seen is not None  # may_be_shares was asked
    source, hidden, dtype = generator(4), seen.shape[1], candidate.dtype
    usual = (*_SIZES, *past_limits(up, hidden, positive(candidate.module), dtype))
    for share in (2 * len(usual), 1):
        sizes = torch.tensor(usual).repeat(2)[:share].repeat(len(up))[:, None]
        x = torch.randn(len(up) * share, hidden, generator=source) * sizes
        yield call(x.to(dtype).to(up.device))
