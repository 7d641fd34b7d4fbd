"""The pass over attention modules whose own code still turns q and k: the function becomes ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from polysilicon.adapt import fusing
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.rebinding import Rebound, global_functions, innermost
from polysilicon.adapt.rotation import recognise_rotation
from polysilicon.adapt.watching import own_code, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from polysilicon.adapt.recording import ModuleCall
    from polysilicon.adapt.watching import Seen
    from polysilicon.adapt.work import Work

#: Child of an attention module whose rotary function is ours.
CHILD = "polysilicon_rotary"


def replace_rotations(work: Work) -> None:
    """Puts our layer in the place of rotary functions; lists those that stay."""
    apart = {
        path: module
        for path, module in work.modules.items()
        if path in work.attention and fusing.CHILD not in module._modules
    }
    if not apart:
        return
    angles = _angles(work)
    for path, seen in watch(work, apart).items():
        _replace(work, path, apart[path], seen, angles)


def _replace(
    work: Work, path: str, module: nn.Module, seen: Seen | str, angles: dict[int, Tensor]
) -> None:
    """One module: what of its functions turns by angles becomes ours or is listed."""
    given = any(id(value) in angles for value in _tensors(work.recording.calls[module]))
    functions = _functions(module)
    named = any(map(_looks_rotary, functions))
    if isinstance(seen, str):
        if given or named:
            work.kept(f"{path}:forward", "rotary", seen)
        return
    layers: dict[str, nn.Module] = {}
    for name, calls in seen.items():
        try:
            layer, error = recognise_rotation(functions[name], calls)
        except Unverified as failure:
            if _looks_rotary(name) or _takes(calls, angles):
                work.kept(f"{path}:{name}", "rotary", str(failure))
            continue
        layers[name] = layer
        work.replaced(f"{path}:{name}", "rotary", layer, error)
    if layers:
        own = own_code(module)
        attending = {} if own is None else own.layers
        rebound = Rebound(module, attending | layers, None if own is None else own.site)
        work.surgery.attach(module, CHILD, rebound)
        work.surgery.set_attribute(module, "forward", rebound.forward)
    elif given and not named:
        work.kept(f"{path}:forward", "rotary", "it turns q and k in its own code")


def _functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    try:
        return global_functions(innermost(type(module).forward))
    except Unverified:
        return {}


def _looks_rotary(name: str) -> bool:
    """By its name, for the report only, as with attention in its own code."""
    return any(word in name.lower() for word in ("rotary", "rotate", "rope"))


def _angles(work: Work) -> dict[int, Tensor]:
    """Everything that the rotary modules gave in the recorded forwards, by id."""
    rotary = [path for path, row in work.rows.items() if row.kind == "rotary"]
    outputs = [
        call.output for path in rotary for call in work.recording.calls.get(work.modules[path], [])
    ]
    return {id(value): value for value in tree_leaves(outputs) if isinstance(value, Tensor)}


def _takes(calls: list[ModuleCall], angles: dict[int, Tensor]) -> bool:
    """Whether one of the arguments is such an angle; of another run, so compared by value."""
    return any(
        x.dtype == angle.dtype and torch.equal(x, angle)
        for x in _tensors(calls)
        for angle in angles.values()
    )


def _tensors(calls: list[ModuleCall]) -> list[Tensor]:
    leaves = tree_leaves([(call.args, call.kwargs) for call in calls])
    return [value for value in leaves if isinstance(value, Tensor)]
