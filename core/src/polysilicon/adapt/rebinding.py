"""The same code of a forward with other functions behind some of its global names.

Nothing is patched: the model's file keeps its functions for every other model. The copy lives in
a module of its own, because the compiler looks the globals of a function up by its module's name.
"""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

from polysilicon.adapt.probe import Unverified
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from polysilicon.records import Problem

_numbers = itertools.count(1)


def innermost(function: Callable[..., Any]) -> types.FunctionType:
    """The function under its decorators.

    Raises:
        Unverified: it is no plain function.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise Unverified("its forward is no plain function")
    return function


def global_functions(function: types.FunctionType) -> dict[str, Callable[..., Any]]:
    """The functions of its file that its code names."""
    known = function.__globals__
    named = {name: known[name] for name in function.__code__.co_names if name in known}
    return {
        name: value
        for name, value in named.items()
        if callable(value) and not isinstance(value, type)
    }


def rebind(
    function: Callable[..., Any], instead: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], str]:
    """The function with `instead` behind its global names, and the name of its new module.

    The new module stays importable until `forget` is called with its name.

    Raises:
        Unverified: a decorator does not show the function that it wraps.
    """
    inner = innermost(function)
    original = inner.__globals__["__name__"]
    module = types.ModuleType(f"polysilicon.adapt.rebound.{original}_{next(_numbers)}")
    name = module.__name__
    vars(module).update(inner.__globals__)
    vars(module).update(instead, __name__=name)
    made = _rebuilt(function, inner, vars(module))
    sys.modules[name] = module
    return made, name


def forget(name: str) -> None:
    """Drops a module that `rebind` made."""
    sys.modules.pop(name, None)


def _rebuilt(
    function: Callable[..., Any], inner: types.FunctionType, names: dict[str, Any]
) -> types.FunctionType:
    """`function` with `inner` over other globals; decorators are rebuilt around it."""
    if not isinstance(function, types.FunctionType):
        raise Unverified("its forward is no plain function")
    if function is inner:
        return _copy(function, names, function.__closure__)
    wrapped = function.__wrapped__  # type: ignore[attr-defined]
    cells = function.__closure__ or ()
    if not any(cell.cell_contents is wrapped for cell in cells):
        raise Unverified("a decorator of its forward does not show what it wraps")
    deeper = _rebuilt(wrapped, inner, names)
    closure = tuple(
        types.CellType(deeper) if cell.cell_contents is wrapped else cell for cell in cells
    )
    made = _copy(function, function.__globals__, closure)
    vars(made)["__wrapped__"] = deeper
    return made


def _copy(
    function: types.FunctionType,
    names: dict[str, Any],
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    code, defaults = function.__code__, function.__defaults__
    made = types.FunctionType(code, names, function.__name__, defaults, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(made).update(vars(function))
    return made


class Rebound(Layer):
    """A module's own forward in which layers of ours stand behind global names.

    The layers are children, so that `prepare()` finds them; a deep copy calls its own.

    Args:
        owner: the module whose forward this is.
        layers: global name → layer.
    """

    owner: nn.Module
    function: Callable[..., Any]

    def __init__(self, owner: nn.Module, layers: dict[str, Layer]) -> None:
        super().__init__()
        # A plain attribute: the owner holds this layer, not the other way round.
        object.__setattr__(self, "owner", owner)
        self.names = tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._bind()

    def _bind(self) -> None:
        layers = {name: self.get_submodule(name) for name in self.names}
        function, module = rebind(type(self.owner).forward, layers)
        object.__setattr__(self, "function", function)
        weakref.finalize(self, forget, module)

    def problems(self) -> dict[str, Problem]:
        """None of its own."""
        return {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the owner's forward gives."""
        return self.function(self.owner, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def extra_repr(self) -> str:
        return ", ".join(self.names)
