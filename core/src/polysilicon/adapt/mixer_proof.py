"""Whether a stand-in computes what a function of a mixer computes: both run on fresh inputs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from polysilicon.adapt.probe import Unverified, call, generator, relative_error, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from polysilicon.adapt.probe import Inputs
    from polysilicon.adapt.recording import ModuleCall
    from polysilicon.adapt.standin import StandIn

#: Sequences and tokens of each: one, fewer than a chunk, more than one.
_SIZES = ((2, 1), (2, 7), (1, 65))

#: Arguments with a number for each token, and the dim of the tokens in those of a prompt.
_TOKENS = {"hidden_states", "dt", "B", "C", "z", "query", "key", "value", "g", "beta"}
#: Arguments that the function changes.
_CHANGED = ("conv_state", "state")
#: Arguments for the state before, and those that ask for the state after.
INITIAL = ("initial_state", "initial_states")
FINAL = ("return_final_states", "output_final_state", "return_last_state")

#: A half-precision result that is further off than this is another function's.
_ROUGH = 0.1


def bound_arguments(function: Callable[..., Any], seen: ModuleCall) -> dict[str, Any]:
    """Argument → value of a recorded call, defaults included, those of `**kwargs` left out."""
    signature = inspect.signature(function)
    bound = signature.bind(*seen.args, **seen.kwargs)
    bound.apply_defaults()
    rest = {p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD}
    return {name: value for name, value in bound.arguments.items() if name not in rest}


def prove(function: Callable[..., Any], kind: type[StandIn], given: Mapping[str, Any]) -> float:
    """Largest relative error of the stand-in of a kind against the function.

    In float32, whatever the model's dtype: the formulas are compared, and with short dtypes
    Transformers rounds in other places. Those are run once, for their results' dtypes.

    Raises:
        Unverified: the results differ, or one of the two raised.
    """
    exact = _cast(given, torch.float32)
    stand_in = kind.build(exact, torch.float32, "", None)
    probes = list(_probes(stand_in, exact))
    reduction = 16 * max(stand_in.layer.state_shape())
    theirs, ours = _observed(function), _observed(stand_in)
    error = verify(theirs, ours, probes, dtype=torch.float32, reduction=reduction)
    dtype = dtype_of(given)
    if dtype != torch.float32:
        _prove_short(function, kind, given, dtype)
    return error


def _prove_short(
    function: Callable[..., Any], kind: type[StandIn], given: Mapping[str, Any], dtype: torch.dtype
) -> None:
    stand_in = kind.build(given, dtype, "", None)
    for probe in _probes(stand_in, given):
        results = [
            _observed(run)(**tree_map_only(Tensor, torch.clone, probe.kwargs))
            for run in (function, stand_in)
        ]
        error = relative_error(*results)
        if not error <= _ROUGH:
            raise Unverified(f"results differ by {error:.1e} of the largest in {dtype}")


def _observed(run: Callable[..., Any]) -> Callable[..., Any]:
    """The result together with the states that the call changed, a row a sequence.

    Not a row a token: what a scan reads of its state may cancel, its error does not.
    """

    def observed(**kwargs: Any) -> Any:
        result = run(**kwargs), [kwargs[name] for name in _CHANGED if name in kwargs]
        return tree_map_only(Tensor, lambda x: x.flatten(1), result)

    return observed


def dtype_of(given: Mapping[str, Any]) -> torch.dtype:
    """Dtype of the activations, which may be wider than the model's."""
    first = next(given[name] for name in given if name in _TOKENS)
    dtype: torch.dtype = first.dtype
    return dtype


def _cast(given: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        # An expanded tensor stays one: a cast lays it out anew.
        name: value[_base(value)].to(dtype).expand(value.shape)
        if isinstance(value, Tensor)
        else value
        for name, value in given.items()
    }


def _base(value: Tensor) -> tuple[slice, ...]:
    """One place of every dim along which an expanded tensor repeats."""
    return tuple(slice(None, None if stride else 1) for stride in value.stride())


def _probes(stand_in: StandIn, given: Mapping[str, Any]) -> Iterator[Inputs]:
    source = generator()
    carries = any(name in given for name in INITIAL)
    for batch, length in _SIZES if stand_in.paged else ((3, 1),):
        for carried in (False, True) if carries else (False,):
            made = {
                name: _fresh(stand_in, name, value, batch, length, source)
                for name, value in given.items()
            }
            for name in INITIAL:
                if name in given:
                    shape = (batch, *stand_in.layer.state_shape())
                    state = torch.randn(shape, generator=source)
                    made[name] = state.to(_device(given)) if carried else None
            made |= {name: True for name in FINAL if name in given}
            yield call(**made)


def _device(given: Mapping[str, Any]) -> torch.device:
    return next(v.device for v in given.values() if isinstance(v, Tensor))


def _fresh(
    stand_in: StandIn, name: str, value: Any, batch: int, length: int, source: torch.Generator
) -> Any:
    """Random numbers in the place of a recorded argument, of as many sequences and tokens."""
    if not isinstance(value, Tensor) or name in INITIAL:
        return value
    shape = list(value.shape)
    if name in _TOKENS or name in _CHANGED:
        shape[0] = batch
    if name in _TOKENS and stand_in.paged:
        shape[stand_in.token_dim] = length
    base = [n if stride or n == 1 else 1 for n, stride in zip(shape, value.stride(), strict=True)]
    if name in _TOKENS:
        base[0] = batch
    made = torch.randn(base, generator=source)
    if name in ("A", "g"):
        made = -F.softplus(made)  # decays
    if name == "beta":
        made = made.sigmoid()
    return made.to(value.device, value.dtype).expand(shape)
