"""Which calls of global functions the forwards of some modules make on the probe prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.adapt import attention_in_code, structure
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.rebinding import Rebound, forget, global_functions, innermost, rebind
from polysilicon.adapt.recording import ModuleCall, run_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from polysilicon.adapt.work import Work

#: function's global name → the calls that one module made
Seen = dict[str, list[ModuleCall]]


def own_code(module: nn.Module) -> Rebound | None:
    """What stands for the module's forward since its attention became ours, if that did."""
    own = module._modules.get(attention_in_code.CHILD)
    return own if isinstance(own, Rebound) and own.method == "forward" else None


def watch(work: Work, apart: dict[str, nn.Module]) -> dict[str, Seen | str]:
    """The probe prompts again, with every call of a global function by these modules noted.

    A text instead says why a module's functions cannot be watched.
    """
    found: dict[str, Seen | str] = {}
    made: list[str] = []
    mark = work.surgery.mark
    try:
        for path, module in apart.items():
            try:
                found[path], name = _watch_one(work, module)
            except Unverified as failure:
                found[path] = str(failure)
            else:
                made.append(name)
        run_probe(work.model, work.scenarios)
    finally:
        work.surgery.undo(mark)
        for name in made:
            forget(name)
    return found


def _watch_one(work: Work, module: nn.Module) -> tuple[Seen, str]:
    own = own_code(module)
    if ("forward" in vars(module) and own is None) or structure.obstacle(module):
        raise Unverified("its forward was replaced before, or it must not be touched")
    seen: Seen = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            seen.setdefault(name, []).append(ModuleCall(args, kwargs, result))
            return result

        return noted

    forward = type(module).forward
    functions = global_functions(innermost(forward))
    watched = {name: noting(name, function) for name, function in functions.items()}
    rebound, name = rebind(forward, watched) if own is None else own.rebind(watched)
    work.surgery.set_attribute(module, "forward", rebound.__get__(module))
    return seen, name
