"""The same code of a forward with other functions behind some of its global names.

Nothing is patched: the model's file keeps its functions for every other model. The copy lives in
a module of its own, because the compiler looks the globals of a function up by its module's name.
"""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polysilicon.adapt.outlining import outlined
from polysilicon.adapt.probe import Unverified
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from polysilicon.adapt.attention_sites import Site
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
    function: Callable[..., Any],
    instead: Mapping[str, Any],
    code: types.CodeType | None = None,
) -> tuple[Callable[..., Any], str]:
    """The function with `instead` behind its global names, and the name of its new module.

    The new module stays importable until `forget` is called with its name. `code` stands for
    that of the function under its decorators, which must have no closure.

    Raises:
        Unverified: a decorator does not show the function that it wraps.
    """
    inner = innermost(function)
    original = inner.__globals__["__name__"]
    module = types.ModuleType(f"polysilicon.adapt.rebound.{original}_{next(_numbers)}")
    name = module.__name__
    vars(module).update(inner.__globals__)
    vars(module).update(instead, __name__=name)
    under = _copy(inner, vars(module), inner.__closure__, code or inner.__code__)
    made = _rebuilt(function, inner, under)
    sys.modules[name] = module
    return made, name


def forget(name: str) -> None:
    """Drops a module that `rebind` made."""
    sys.modules.pop(name, None)


def _rebuilt(
    function: Callable[..., Any], inner: types.FunctionType, under: types.FunctionType
) -> types.FunctionType:
    """`function` with `under` in the place of `inner`; decorators are rebuilt around it."""
    if not isinstance(function, types.FunctionType):
        raise Unverified("its forward is no plain function")
    if function is inner:
        return under
    wrapped = function.__wrapped__  # type: ignore[attr-defined]
    cells = function.__closure__ or ()
    if not any(cell.cell_contents is wrapped for cell in cells):
        raise Unverified("a decorator of its forward does not show what it wraps")
    deeper = _rebuilt(wrapped, inner, under)
    closure = tuple(
        types.CellType(deeper) if cell.cell_contents is wrapped else cell for cell in cells
    )
    made = _copy(function, function.__globals__, closure, function.__code__)
    vars(made)["__wrapped__"] = deeper
    return made


def _copy(
    function: types.FunctionType,
    names: dict[str, Any],
    closure: tuple[types.CellType, ...] | None,
    code: types.CodeType,
) -> types.FunctionType:
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(made).update(vars(function))
    return made


class Rebound(Layer):
    """A method of a module, its forward for one, in which layers stand behind global names.

    The layers are children, so that `prepare()` finds them; a deep copy calls its own.

    Args:
        owner: the module whose method this is.
        layers: global name → layer.
        site: the method and where in its code it attends, where a layer does that; None means
            forward, with its code as it is.
    """

    owner: nn.Module
    function: Callable[..., Any]

    def __init__(
        self,
        owner: nn.Module,
        layers: Mapping[str, nn.Module],
        site: Site | None = None,
    ) -> None:
        super().__init__()
        # A plain attribute: the owner holds this layer, not the other way round.
        object.__setattr__(self, "owner", owner)
        self.names, self.site = tuple(layers), site
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._bind()

    def _bind(self) -> None:
        function, module = self.rebind()
        object.__setattr__(self, "function", function)
        weakref.finalize(self, forget, module)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Global name → layer."""
        return {name: self.get_submodule(name) for name in self.names}

    @property
    def method(self) -> str:
        """Name of the owner's method that this is."""
        return "forward" if self.site is None else self.site.method

    def rebind(
        self, more: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    ) -> tuple[Callable[..., Any], str]:
        """The owner's method with the layers and `more` behind its global names; see `rebind`."""
        original = getattr(type(self.owner), self.method)
        code = None if self.site is None else outlined(innermost(original), self.site)
        return rebind(original, {**self.layers, **more}, code)

    def problems(self) -> dict[str, Problem]:
        """None of its own."""
        return {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the owner's method gives."""
        return self.function(self.owner, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def extra_repr(self) -> str:
        return ", ".join(self.names)
