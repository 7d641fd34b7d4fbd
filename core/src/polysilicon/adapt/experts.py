"""Recognises experts: modules with stacked weights that run each token through those chosen."""

from __future__ import annotations

import functools
import inspect
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt import structure
from polysilicon.adapt.probe import (
    Inputs,
    Unverified,
    answers,
    call,
    first_verified,
    generator,
    verify_answers,
)
from polysilicon.layers.activation import Activation
from polysilicon.layers.experts import Experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polysilicon.adapt.structure import Candidate
    from polysilicon.layers.base import Layer

_USUAL = ("silu", "gelu_tanh", "gelu", "relu2", "relu")
_SIZES = (1e-2, 1.0, 10.0)


def may_be_experts(candidate: Candidate) -> bool:
    """Two stacks of matrices, and a recorded call with tokens, chosen experts and weights."""
    own = structure.parameters(candidate.module)
    stacks = [value for value in own.values() if value.dim() == 3]
    others = [value for value in own.values() if value.dim() != 3]
    if len(stacks) != 2 or any(value.dim() != 2 for value in others) or len(others) > 2:
        return False
    if any(True for child in candidate.module.children() for _ in child.parameters()):
        return False
    return _arguments(candidate) is not None


def _arguments(candidate: Candidate) -> tuple[int, int, int] | None:
    """Places of tokens [T, H], experts [T, k] and weights [T, k] among the arguments."""
    if candidate.call is None:
        return None
    values = (*candidate.call.args, *candidate.call.kwargs.values())
    if len(values) != 3 or not all(isinstance(v, Tensor) and v.dim() == 2 for v in values):
        return None
    whole = [i for i, value in enumerate(values) if not value.is_floating_point()]
    output = candidate.call.output
    if len(whole) != 1 or not isinstance(output, Tensor) or output.shape != values[0].shape:
        return None
    if whole[0] == 0 or values[1].shape != values[2].shape:
        return None
    return 0, whole[0], 3 - whole[0]


class ExpertsLike(Experts):
    """Experts that take their arguments in the order and by the names of a model's own.

    Args:
        arguments: names of tokens, chosen experts and weights, in the model's order.
        places: of tokens, chosen experts and weights among them.
        settings: see Experts.
    """

    def __init__(
        self,
        *tensors: Any,
        arguments: tuple[str, ...],
        places: tuple[int, int, int],
        **settings: Any,
    ) -> None:
        super().__init__(*tensors, **settings)
        self.arguments, self.places = arguments, places

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """[T, H], int64 [T, k] and [T, k] in the model's order → [T, H]."""
        return super().forward(*reordered(self.arguments, self.places, args, kwargs))


def reordered(
    arguments: tuple[str, ...],
    places: tuple[int, int, int],
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, chosen experts and weights of a call that gives them in a model's own order."""
    given = [*args, *(kwargs[name] for name in arguments[len(args) :])]
    x, indices, weights = (given[place] for place in places)
    return x, indices, weights


def recognise_experts(candidate: Candidate) -> tuple[Layer, float]:
    """Our experts over the module's own weights, and the error measured.

    Raises:
        Unverified: no reading of its weights and no activation reproduced it.
    """
    # A stack of experts is large, and there are many forms: the module is asked once.
    asked = functools.cache(partial(_asked, candidate))
    attempts = [partial(_attempt, candidate, asked, form) for form in _forms(candidate)]
    return first_verified(attempts, "the shapes of its weights are not those of experts")


def _forms(candidate: Candidate) -> Iterator[dict[str, Any]]:
    seen, places = candidate.call, _arguments(candidate)
    assert seen is not None  # may_be_experts was asked
    assert places is not None
    values = (*seen.args, *seen.kwargs.values())
    names = _argument_names(candidate)
    for form in stack_forms(candidate.module, values[0].shape[1], top_k=values[1].shape[1]):
        yield {**form, "arguments": names, "places": places}


def stack_forms(module: torch.nn.Module, hidden: int, *, top_k: int) -> Iterator[dict[str, Any]]:
    """Arguments of Experts (and `tensors`) for every reading of the module's two stacks."""
    own = structure.parameters(module)
    stacks = {name: value for name, value in own.items() if value.dim() == 3}
    biases = {name: value for name, value in own.items() if value.dim() == 2}
    for (up, down), transposed, gated in itertools.product(
        itertools.permutations(stacks), (False, True), (True, False)
    ):
        rows, columns = (2, 1) if transposed else (1, 2)
        width = stacks[up].shape[rows] // (2 if gated else 1)
        if stacks[up].shape[columns] != hidden or stacks[down].shape[rows] != hidden:
            continue
        if stacks[down].shape[columns] != width or (gated and stacks[up].shape[rows] % 2):
            continue
        chosen = _biases(biases, stacks[up].shape[rows], hidden)
        if chosen is None:
            continue
        for rule in _rules(module, gated):
            yield {
                "tensors": (stacks[up], stacks[down], *(biases.get(name) for name in chosen)),
                "names": (up, down, chosen[0] or "up_bias_", chosen[1] or "down_bias_"),
                "gated": gated,
                "transposed": transposed,
                # More first matrices than second ones: the rest may be identities.
                "identities": max(0, len(stacks[up]) - len(stacks[down])),
                "top_k": top_k,
                **rule,
            }


def _argument_names(candidate: Candidate) -> tuple[str, ...]:
    return tuple(inspect.signature(candidate.module.forward).parameters)


def _biases(biases: dict[str, Any], up: int, down: int) -> tuple[str, str] | None:
    """Names of the biases of up and down, empty for none; None where they don't fit."""
    if not biases:
        return "", ""
    if len(biases) != 2:
        return None
    first, second = biases
    for one, other in ((first, second), (second, first)):
        if biases[one].shape[1] == up and biases[other].shape[1] == down:
            return one, other
    return None


def _rules(module: torch.nn.Module, gated: bool) -> Iterator[dict[str, Any]]:
    """Activations, and how gate and up lie and are clamped."""
    kinds = [c.kind for c in module.children() if isinstance(c, Activation)] or list(_USUAL)
    for kind in kinds:
        yield {"activation": kind}
    if not gated:
        return
    numbers = positive(module)
    for interleaved in (True, False):
        for kind in kinds:
            if interleaved:
                yield {"activation": kind, "interleaved": True}
            for limit in numbers:
                yield {"activation": kind, "interleaved": interleaved, "limit": limit}
        for alpha, limit in itertools.product(numbers, (0.0, *numbers)):
            yield {"interleaved": interleaved, "alpha": alpha, "limit": limit}


def positive(module: torch.nn.Module) -> list[float]:
    """The module's numbers that may be a clamp or a factor."""
    return [number for number in structure.numbers(module) if number > 0]


def _asked(candidate: Candidate, up: str) -> tuple[list[Inputs], list[Any]]:
    """The probes for a reading in which `up` names the first stack, and the module's answers."""
    stack = structure.parameters(candidate.module)[up]
    probes = list(_probes(candidate, stack))
    return probes, answers(candidate.module, probes)


def _attempt(
    candidate: Candidate,
    asked: Callable[[str], tuple[list[Inputs], list[Any]]],
    form: dict[str, Any],
) -> tuple[Layer, float]:
    given = dict(form)
    tensors = given.pop("tensors")
    try:
        layer = ExpertsLike(*tensors, **given).eval()
    except (TypeError, ValueError) as refusal:
        raise Unverified(str(refusal)) from refusal
    width = max(tensors[0].shape[1:])
    probes, theirs = asked(form["names"][0])
    dtype = candidate.dtype
    return layer, verify_answers(theirs, layer, probes, dtype=dtype, reduction=8 * width)


def _probes(candidate: Candidate, up: Tensor) -> Iterator[Inputs]:
    """Tokens of every size through all experts, unevenly, and one token alone."""
    places, dtype = _arguments(candidate), candidate.dtype
    assert candidate.call is not None  # may_be_experts was asked
    assert places is not None
    values = (*candidate.call.args, *candidate.call.kwargs.values())
    hidden, top_k = values[0].shape[1], values[1].shape[1]
    source, experts = generator(4), up.shape[0]
    usual = (*_SIZES, *past_limits(up, hidden, positive(candidate.module), dtype))
    for tokens in (max(2 * experts + 3, 2 * len(usual)), 1):
        sizes = torch.tensor(usual).repeat(tokens)[:tokens, None]
        x = torch.randn(tokens, hidden, generator=source) * sizes
        indices = torch.rand(tokens, experts, generator=source).argsort(-1)[:, :top_k]
        # Half of the tokens go to the first experts, so that loads differ.
        indices[::2] = torch.arange(top_k)
        weights = torch.rand(tokens, top_k, generator=source)
        placed = dict(zip(places, (x.to(dtype), indices, weights.to(dtype)), strict=True))
        yield call(*(placed[i].to(up.device) for i in range(3)))


def past_limits(
    up: Tensor, hidden: int, numbers: list[float], dtype: torch.dtype
) -> Iterator[float]:
    """Sizes of hidden states that drive gate and up past each number, if that were a limit.

    Small weights would never reach a clamp with usual hidden states, and a reading without one
    would pass. Past the root of the dtype's range gate times up overflows.
    """
    grown = float(up.float().square().mean().sqrt()) * hidden**0.5
    if grown == 0:
        return
    most = torch.finfo(dtype).max ** 0.5 / 16
    yield from sorted({min(4 * number, most) / grown for number in numbers})
