"""Where a module's own code attends: found in one run of the model, by what flows into what.

Attention is a product whose result goes through a softmax into another product, or one call of
PyTorch's fused function. Where in the code it happens is told by the frames that made the calls.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.rebinding import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import CodeType, FrameType

#: First line, last line, first column, column after the last, as `co_positions` has them.
Position = tuple[int | None, int | None, int | None, int | None]

FUSED = "scaled_dot_product_attention"
#: PyTorch's names of products of two activations.
_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
#: Results of these are new activations, whatever went in.
_NEW = frozenset({"linear", "layer_norm", "rms_norm", "embedding", "addmm", FUSED})


@dataclass(frozen=True)
class Site:
    """Where a method of a module attends.

    Attributes:
        method: its name in the module's class.
        product: the expression that multiplies queries and keys; the whole of a fused call.
        softmax: the expression that makes weights of scores; None for a fused call.
        values: the expression that multiplies weights and values; None for a fused call.
    """

    method: str
    product: Position
    softmax: Position | None = None
    values: Position | None = None


@dataclass(frozen=True)
class _Place:
    """One frame of a call: a method of a module of the model."""

    frame: int
    code: CodeType
    position: Position
    module: nn.Module


@dataclass(frozen=True)
class _Scores:
    """What a tensor was made of: a product, and perhaps a softmax of it."""

    product: list[_Place]
    softmax: list[_Place] | None = None


class Watch(TorchFunctionMode):
    """Notes every site of attention in methods of `modules` while it is active."""

    def __init__(self, modules: Collection[nn.Module]) -> None:
        super().__init__()
        self.sites: dict[nn.Module, set[Site]] = {}
        self._modules = frozenset(modules)
        # Tensors stay alive here, so that an id stays its own.
        self._known: dict[int, tuple[Tensor, _Scores]] = {}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the function and follows what it made."""
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        found = self._found(args, kwargs)
        if name in _PRODUCTS:
            if found is not None and found.softmax is not None:
                self._note(found.product, found.softmax, self._places())
            elif isinstance(result, Tensor):
                self._keep(result, _Scores(self._places()))
        elif name == FUSED:
            self._note(self._places())
        elif name == "softmax" and found is not None:
            self._keep(result, _Scores(found.product, self._places()))
        elif found is not None and name not in _NEW and _is_floating(result):
            self._keep(result, found)
        return result

    def _found(self, args: Any, kwargs: Any) -> _Scores | None:
        known = (self._known.get(id(x)) for x in tree_leaves((args, kwargs)))
        return next((entry[1] for entry in known if entry is not None), None)

    def _keep(self, tensor: Tensor, scores: _Scores) -> None:
        self._known[id(tensor)] = tensor, scores

    def _places(self) -> list[_Place]:
        return list(_places(sys._getframe(2), self._modules))

    def _note(self, *calls: list[_Place]) -> None:
        """Notes the innermost method that made all of these calls."""
        for place in calls[0]:
            same = [
                next((p for p in call if (p.frame, p.code) == (place.frame, place.code)), None)
                for call in calls
            ]
            if all(same):
                positions = [p.position for p in same if p is not None]
                site = Site(place.code.co_name, *positions)
                self.sites.setdefault(place.module, set()).add(site)
                return


def _places(frame: FrameType | None, modules: frozenset[nn.Module]) -> Iterator[_Place]:
    """The frames that run a method of one of the modules' own classes, innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in modules and _is_method(module, code):
                position = list(code.co_positions())[frame.f_lasti // 2]
                yield _Place(id(frame), code, position, module)
        frame = frame.f_back


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_method(module: nn.Module, code: CodeType) -> bool:
    """Whether the code is of a method that the model's own file defines."""
    try:
        found = innermost(getattr(type(module), code.co_name, None))  # type: ignore[arg-type]
    except Unverified:
        return False
    return found.__code__ is code and not found.__module__.startswith("torch.")
