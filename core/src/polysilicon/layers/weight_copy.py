"""What reading a packed weight gives: a copy that may be read at will and not written to.

Model code writes to `weight.data`, `weight.detach()` and to views, as these share the memory of a
plain Parameter. Those of a packed one can't, so that writing to them raises instead of being lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polysilicon.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class WeightCopy(Tensor):
    """A logical value of a packed weight, or a view of one.

    What has memory of its own, such as `clone()`, is a plain tensor again; saved, it is one too.
    """

    packed_as: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OF_ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for copy in written(func, args, kwargs):
            if isinstance(copy, WeightCopy):
                _refuse(func.__name__, copy)
        seen: dict[int, Tensor] = {}
        packed_as = ""

        def plain(copy: WeightCopy) -> Tensor:
            nonlocal packed_as
            packed_as = copy.packed_as
            with torch._C.DisableTorchFunctionSubclass():
                return seen.setdefault(id(copy), copy.as_subclass(Tensor))

        args, kwargs = tree_map_only(WeightCopy, plain, (args, kwargs))
        return as_copies(func, func(*args, **kwargs), seen.values(), packed_as)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_param" and value:
            # How torch makes a Parameter of a subclass, e.g. of an entry of a state dict: from
            # here on the memory is that Parameter's.
            del self.packed_as
            self.__class__ = nn.Parameter  # type: ignore[assignment]
        else:
            super().__setattr__(name, value)


def _refusing(name: str) -> Callable[[WeightCopy, Any], NoReturn]:
    def refuse(self: WeightCopy, other: Any) -> NoReturn:
        _refuse(name, self)

    return refuse


# torch takes a TypeError in these for "not supported", and Python would then go on without them.
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or"):
    setattr(WeightCopy, f"__i{_name}__", _refusing(f"__i{_name}__"))

_OF_ITSELF = {
    Tensor.__hash__,
    Tensor.requires_grad_,
    Tensor.detach_,
    *(
        access
        for name in ("requires_grad", "grad", "grad_fn", "is_leaf")
        for access in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
    ),
}


def as_copies(func: Any, result: Any, read: Iterable[Tensor], packed_as: str) -> Any:
    """The result of a torch function, read-only where it lies in the memory of what was read.

    Args:
        func: the function.
        result: what it gave for plain tensors.
        read: those of its arguments that are copies of packed weights.
        packed_as: the layout's name, for errors.
    """
    if func in (Tensor.numpy, Tensor.__array__):
        result.setflags(write=False)
        return result
    memory = {_memory(tensor) for tensor in read}

    def wrap(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or _memory(tensor) not in memory:
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            copy = tensor.as_subclass(WeightCopy)
        copy.packed_as = packed_as
        return copy

    return tree_map_only(Tensor, wrap, result)


def _memory(tensor: Tensor) -> int | None:
    # Sparse tensors have no storage. The object's address, as meta tensors have no data's.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call writes to: torch's names say so."""
    name = getattr(func, "__name__", "")
    name = name.partition(".")[0]  # an overload's: `copy_.default`
    in_place = name in ("__setitem__", "__set__") or (
        name.startswith("__i")
        and name not in ("__init__", "__invert__", "__int__", "__index__", "__iter__")
    )
    in_place |= name.endswith("_") and not name.endswith("__")
    in_place |= kwargs.get("inplace") is True
    first = [*args, *kwargs.values()][:1]  # nn.init passes all by keyword
    found = [*(first if in_place else ()), kwargs.get("out")]
    return [
        one for value in found for one in (value if isinstance(value, (list, tuple)) else [value])
    ]


def _refuse(name: str, copy: WeightCopy) -> NoReturn:
    raise LayoutError(
        f"{name} would write to a copy of a packed weight (layout {copy.packed_as}), and "
        "the weight would not change: write to the Parameter itself (weight.copy_(value), "
        "weight[...] = value, weight.zero_()), assign a new one, or make it plain first with "
        "unpack() of its layer; .clone() gives a tensor to change"
    )
