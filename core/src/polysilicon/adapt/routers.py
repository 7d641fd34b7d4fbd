"""Recognises routers: leaves that turn hidden states into experts and weights."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt import structure
from polysilicon.adapt.probe import Unverified, first_verified, generator, relative_error
from polysilicon.errors import AdaptError
from polysilicon.layers.router import Router
from polysilicon.ops.contract import tolerance
from polysilicon.ops.moe_router import AFTER, SCORINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.adapt.structure import Candidate
    from polysilicon.layers.base import Layer

#: Hidden states of the probes: small ones, usual ones, and some that saturate a softmax.
_SIZES = (1e-2, 1.0, 10.0)
_TOKENS = 24


@dataclass(frozen=True)
class _Results:
    """Places of the logits, weights and experts in the module's result; logits may be absent."""

    logits: int | None
    weights: int
    indices: int
    length: int


class RouterLike(Router):
    """A router that gives its results in the order and dtypes of a model's own.

    Args:
        results: places of logits, weights and experts in the tuple; None for no logits.
        dtypes: of the logits and the weights; None for no logits.
        scored: gives scores where others give logits.
        held: name and module of a child that holds the correction, as its only tensor.
        settings: see Router.
    """

    #: name of the child that holds the correction; empty for none
    held: str = ""

    def __init__(
        self,
        *tensors: Any,
        results: tuple[int | None, int, int],
        dtypes: tuple[torch.dtype | None, torch.dtype],
        scored: bool,
        held: tuple[str, torch.nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*tensors, **settings)
        if held:
            self.held = held[0]
            self.add_module(*held)
        self.results, self.dtypes, self.scored = results, dtypes, scored

    def _tensor(self, index: int) -> Tensor | None:
        if index < 2 or not self.held:
            return super()._tensor(index)
        (correction,) = structure.tensors(self.get_submodule(self.held)).values()
        return correction.flatten()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the model's router returns; the argument after x, if any, is the correction."""
        logits, weights, indices = super().forward(x, *args, *kwargs.values())
        if self.scored:
            logits = self.scores(logits)
        given = (logits, weights, indices)
        kinds = (*self.dtypes, None)
        found = {
            place: value if kind is None else value.to(kind)
            for place, value, kind in zip(self.results, given, kinds, strict=True)
            if place is not None
        }
        return tuple(found[place] for place in sorted(found))


def refuse_logits(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Transformers records router logits off its own classes, of which the model has none now.

    Raises:
        AdaptError: the call, or the model's config, asks for them.
    """
    asked = kwargs.get("output_router_logits")
    if getattr(model.config, "output_router_logits", False) if asked is None else asked:
        raise AdaptError(
            "output_router_logits=True was asked of an adapted model, and Transformers takes them "
            "from its own router classes: call undo() first, or run the model without adapt()"
        )


def may_be_router(candidate: Candidate) -> bool:
    """A matrix [experts, hidden] and a recorded result that names experts.

    A leaf, or with one child that holds nothing but the correction.
    """
    return _matrix(candidate) is not None and _results(candidate) is not None


def _matrix(candidate: Candidate) -> tuple[str, Tensor] | None:
    own = structure.parameters(candidate.module)
    found = [(name, value) for name, value in own.items() if value.dim() == 2]
    if len(found) != 1:
        return None
    fits = structure.is_leaf(candidate.module) or _held(candidate.module, len(found[0][1]))
    return found[0] if fits else None


def _held(module: torch.nn.Module, experts: int) -> dict[str, Tensor]:
    """Name of the only child and the numbers, one for each expert, that are all it holds."""
    children = list(module.named_children())
    if len(children) != 1 or not structure.is_leaf(children[0][1]):
        return {}
    inside = list(structure.tensors(children[0][1]).values())
    fits = len(inside) == 1 and inside[0].numel() == inside[0].shape[-1] == experts
    return {children[0][0]: inside[0]} if fits else {}


def _results(candidate: Candidate) -> _Results | None:
    output = None if candidate.call is None else candidate.call.output
    if not isinstance(output, tuple) or len(output) not in (2, 3):
        return None
    if not all(isinstance(value, Tensor) and value.dim() == 2 for value in output):
        return None
    whole = [i for i, value in enumerate(output) if not value.is_floating_point()]
    if len(whole) != 1:
        return None
    matrix = _matrix(candidate)
    assert matrix is not None  # may_be_router asks for it first
    chosen, experts = output[whole[0]].shape[1], matrix[1].shape[0]
    floats = [i for i in range(len(output)) if i != whole[0]]
    weights = [i for i in floats if output[i].shape[1] == chosen]
    logits = [i for i in floats if output[i].shape[1] == experts]
    if chosen == experts or len(weights) != 1 or len(logits) != len(floats) - 1:
        return None
    return _Results(logits[0] if logits else None, weights[0], whole[0], len(output))


def recognise_router(candidate: Candidate) -> tuple[Layer, float]:
    """Our router over the module's own weights, and the error measured.

    Raises:
        Unverified: no way to score and to choose reproduced it.
    """
    matrix, results = _matrix(candidate), _results(candidate)
    assert matrix is not None  # may_be_router was asked
    assert results is not None
    extra = _extra(candidate, matrix[1].shape[0])
    probes = [x.to(matrix[1].device) for x in _probes(matrix[1].shape[1], candidate.dtype)]
    with _told_apart([*_vectors(candidate, matrix[1].shape[0]).values(), *extra]):
        try:
            theirs = [candidate.module(x.clone(), *extra) for x in probes]
        # Foreign code on made-up inputs: whatever it raises means "not what we took it for".
        except Exception as error:
            raise Unverified(f"the original raised {type(error).__name__}: {error}") from error
        attempts = [
            partial(_attempt, settings, results, extra, probes, theirs, candidate.dtype)
            for settings in _settings(candidate, matrix, results, theirs[0])
        ]
        return first_verified(attempts, "none of the ways to score experts that we know fits it")


def _vectors(candidate: Candidate, experts: int) -> dict[str, Tensor]:
    """The module's vectors of one number for each expert: its own, and that of its child."""
    own = structure.tensors(candidate.module).items()
    return {name: value for name, value in own if value.shape == (experts,)} | _held(
        candidate.module, experts
    )


@contextmanager
def _told_apart(vectors: list[Tensor]) -> Iterator[None]:
    """Other values in the vectors for as long as the proof runs, then their own, to the bit.

    Before training a correction is zero, and zero fits every role; weights loaded later would
    then be read in a role that was never proved.
    """
    source = generator(5)
    own = [vector.detach().clone() for vector in vectors]
    try:
        for vector in vectors:
            vector.data.copy_(torch.randn(vector.shape, generator=source) / 2)
        yield
    finally:
        for vector, values in zip(vectors, own, strict=True):
            vector.data.copy_(values)


def _extra(candidate: Candidate, experts: int) -> tuple[Tensor, ...]:
    """The correction [experts] that the model passes after the hidden states, if it does."""
    assert candidate.call is not None  # may_be_router asks for it
    values = (*candidate.call.args, *candidate.call.kwargs.values())[1:]
    if not values:
        return ()
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].shape != (experts,):
        raise Unverified("it is called with more than hidden states and a correction")
    return (values[0].clone(),)


def _probes(hidden: int, dtype: torch.dtype) -> Iterator[Tensor]:
    source = generator(3)
    for size in _SIZES:
        yield (torch.randn(_TOKENS, hidden, generator=source) * size).to(dtype)


def _settings(
    candidate: Candidate, matrix: tuple[str, Tensor], results: _Results, seen: tuple[Tensor, ...]
) -> Iterator[dict[str, Any]]:
    """Every way to choose that the module's tensors and numbers allow, the plainest first."""
    module, (name, weight) = candidate.module, matrix
    experts, top_k = weight.shape[0], seen[results.indices].shape[1]
    vectors, child = _vectors(candidate, experts), _held(module, experts)
    if len(structure.tensors(module)) + len(child) - 1 != len(vectors) or len(vectors) > 2:
        return
    numbers = structure.numbers(module)
    scales = dict.fromkeys([1.0, *(n for n in numbers if n > 0)])
    wide = (False,) if weight.dtype == candidate.dtype == torch.float32 else (False, True)
    logits = None if results.logits is None else seen[results.logits].dtype
    for roles, form, scoring, group, renormalize, scale, scored in itertools.product(
        _roles(list(vectors)),
        wide,
        SCORINGS,
        _groups(numbers, experts, top_k),
        (True, False),
        scales,
        (False, True),
    ):
        if scored and (results.logits is None or scoring in AFTER):
            continue
        bias, correction = roles
        if bias in child:
            continue
        holds = correction in child
        yield {
            "tensors": (weight, vectors.get(bias), None if holds else vectors.get(correction)),
            "names": (
                name,
                bias or "bias_",
                "correction_" if holds else correction or "correction_",
            ),
            "held": (correction, module.get_submodule(correction)) if holds else None,
            "top_k": top_k,
            "scoring": scoring,
            "groups": group[0],
            "top_groups": group[1],
            "group_top": group[2],
            "renormalize": renormalize,
            "scale": scale,
            "wide": form,
            "scored": scored,
            "dtypes": (logits, seen[results.weights].dtype),
        }


def _roles(vectors: list[str]) -> list[tuple[str, str]]:
    """(bias of the logits, correction of the choice) by name; empty for none."""
    if not vectors:
        return [("", "")]
    if len(vectors) == 1:
        return [(vectors[0], ""), ("", vectors[0])]
    first, second = vectors
    return [(first, second), (second, first)]


def _groups(numbers: list[float], experts: int, top_k: int) -> list[tuple[int, int, int]]:
    """(groups, open groups, how many make a group's score), none first."""
    whole = sorted({int(n) for n in numbers if n == int(n) and 1 <= n < experts})
    found = [(1, 1, 1)]
    for groups in whole:
        if groups == 1 or experts % groups:
            continue
        for opened in whole:
            size = experts // groups
            if opened < groups and top_k <= size * opened:
                found += [(groups, opened, 2), (groups, opened, 1)] if size > 1 else []
    return found


def _attempt(
    settings: dict[str, Any],
    results: _Results,
    extra: tuple[Tensor, ...],
    probes: list[Tensor],
    theirs: list[tuple[Tensor, ...]],
    dtype: torch.dtype,
) -> tuple[Layer, float]:
    given = dict(settings)
    places = (results.logits, results.weights, results.indices)
    layer = RouterLike(*given.pop("tensors"), results=places, **given).eval()
    weight = given["names"][0]
    experts, hidden = getattr(layer, weight).shape
    bound = tolerance(dtype, 4 * hidden)[0]
    worst = 0.0
    for x, expected in zip(probes, theirs, strict=True):
        try:
            ours = layer(x, *extra)
        except (RuntimeError, TypeError) as failure:  # e.g. float32 weights and shorter states
            raise Unverified(f"the replacement raised {failure}") from failure
        for place in range(results.length):
            if place == results.indices:
                continue
            a, b = expected[place], ours[place]
            if a.dtype != b.dtype:
                raise Unverified(f"result {place} is {b.dtype} instead of {a.dtype}")
            if place == results.weights:
                # By expert: the order of the chosen ones is nobody's promise.
                a = _by_expert(a, expected[results.indices], experts)
                b = _by_expert(b, ours[results.indices], experts)
            error = relative_error(a, b)
            if not error <= bound:
                raise Unverified(f"results differ by {error:.1e}, allowed {bound:.1e}")
            worst = max(worst, error)
    return layer, worst


def _by_expert(weights: Tensor, indices: Tensor, experts: int) -> Tensor:
    return weights.new_zeros(len(weights), experts).scatter(-1, indices, weights)
