"""The pass over recurrent mixers: what convolves, scans and corrects in their forward is ours.

The forward stays the model's, with our layers behind the global names of those functions: the
projections, gates and splits of the many mixers differ, these few functions do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from polysilicon.adapt import structure
from polysilicon.adapt.mixer_proof import FINAL, INITIAL, bound_arguments, dtype_of, prove
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.rebinding import Rebound, global_functions, innermost
from polysilicon.adapt.report import Row
from polysilicon.adapt.standins import stand_in_for
from polysilicon.adapt.watching import watch
from polysilicon.adapt.work import ops_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from polysilicon.adapt.recording import ModuleCall
    from polysilicon.adapt.standin import StandIn
    from polysilicon.adapt.watching import Seen
    from polysilicon.adapt.work import Work

#: Child of a mixer that holds our layers.
CHILD = "polysilicon_mixer"

#: What was proved: function, problems, arguments left out → error, or why it failed.
Proofs = dict[tuple[Any, ...], float | str]


def replace_mixers(work: Work) -> None:
    """Puts our layers behind the functions of every mixer that they reproduce; lists the rest."""
    mixers = {path: module for path, module in work.modules.items() if _functions(module)}
    if not mixers:
        return
    proofs: Proofs = {}
    for path, seen in watch(work, mixers).items():
        try:
            _replace(work, path, mixers[path], seen, proofs)
        except Unverified as failure:
            work.kept(path, "mixer", str(failure))
            for child in [] if isinstance(seen, str) else _given(work, path, mixers[path], seen):
                work.kept(child, "mixer", "its weights are the mixer's, which was kept")


def _functions(module: nn.Module) -> dict[str, tuple[Callable[..., Any], type[StandIn]]]:
    """Global name → function of the mixer's file that we may have a layer for, and its kind."""
    if structure.is_leaf(module) and not structure.parameters(module):
        return {}
    try:
        found = global_functions(innermost(type(module).forward))
    except Unverified:
        return {}
    kinds = {name: (function, stand_in_for(function)) for name, function in found.items()}
    return {name: (function, kind) for name, (function, kind) in kinds.items() if kind is not None}


def _replace(work: Work, path: str, module: nn.Module, seen: Seen | str, proofs: Proofs) -> None:
    if isinstance(seen, str):
        raise Unverified(seen)
    functions, worst = _functions(module), 0.0
    layers: dict[str, StandIn] = {}
    for name, (function, kind) in functions.items():
        if name not in seen:
            continue  # a decode step that no probe prompt reached stays as it is
        if kind.paged and len(seen[name]) > len(work.recording.calls[module]):
            raise Unverified(f"it calls {name} several times in one forward")
        try:
            layers[name], error = _stand_in(work, path, function, kind, seen[name], proofs)
        except Unverified as failure:
            raise Unverified(f"{name}: {failure}") from None
        worst = max(worst, error)
    if not any(layer.paged for layer in layers.values()):
        raise Unverified("the probe prompts did not reach its functions")
    rebound = Rebound(module, dict(layers))
    work.surgery.attach(module, CHILD, rebound)
    work.surgery.set_attribute(module, "forward", rebound.forward)
    for name, stand_in in layers.items():
        if stand_in.paged:
            work.recurrent[f"{path}:{name}"] = stand_in.layer
    by = ", ".join(dict.fromkeys(type(one.layer).__name__ for one in layers.values()))
    for part in (path, *_given(work, path, module, seen)):
        work.rows[part] = Row(
            path=part,
            kind="mixer",
            status="replaced",
            replaced_by=by,
            op=ops_of(rebound),
            error=worst,
        )


def _stand_in(
    work: Work,
    path: str,
    function: Callable[..., Any],
    kind: type[StandIn],
    calls: list[ModuleCall],
    proofs: Proofs,
) -> tuple[StandIn, float]:
    """Our layer for all calls of one function by one mixer, and the error of its proof."""
    every = [bound_arguments(function, one) for one in calls]
    made = [kind.build(given, dtype_of(given), path, work.context) for given in every]
    facts = [_facts(function, one, given) for one, given in zip(made, every, strict=True)]
    if any(one != facts[0] for one in facts):
        raise Unverified("it is called in several ways")
    # Once for all layers of a model: their functions are the same, their weights arguments.
    if facts[0] not in proofs:
        try:
            proofs[facts[0]] = prove(function, kind, every[0])
        except Unverified as failure:
            proofs[facts[0]] = str(failure)
    error = proofs[facts[0]]
    if isinstance(error, str):
        raise Unverified(error)
    return made[0], error


def _facts(
    function: Callable[..., Any], stand_in: StandIn, given: dict[str, Any]
) -> tuple[Any, ...]:
    problems = tuple(map(repr, stand_in.layer.problems().values()))
    left_out = {*INITIAL, *FINAL, "chunk_size"}  # these change from call to call, or nothing
    settings = tuple(
        (name, value)
        for name, value in given.items()
        if not isinstance(value, Tensor) and name not in left_out
    )
    return function, problems, settings


def _given(work: Work, path: str, module: nn.Module, seen: Seen) -> list[str]:
    """Children that no pass took for layers, whose weights the mixer passed on."""
    known = {name for name, row in work.rows.items() if row.status == "replaced"}
    passed = {
        value.data_ptr()
        for calls in seen.values()
        for one in calls
        for value in (*one.args, *one.kwargs.values())
        if isinstance(value, Tensor)
    }
    return [
        f"{path}.{name}"
        for name, child in module.named_children()
        if structure.is_leaf(child)
        and structure.parameters(child)
        and f"{path}.{name}" not in known
        and any(p.data_ptr() in passed for p in structure.parameters(child).values())
    ]
