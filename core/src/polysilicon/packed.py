"""A tensor in a layout: typed, so that nothing reads it as if it were plain.

`pack()` makes one, `Packed.unpack()` gives the plain tensor back. A kernel that takes an argument
packed says so in `Kernel.layouts`; whatever else is handed a `Packed` raises `LayoutError`.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from polysilicon.calling import load_target
from polysilicon.errors import LayoutError
from polysilicon.layouts import Padding
from polysilicon.records import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_REMEDY = (
    "call .unpack() for the plain tensor, or give it to a kernel whose Kernel.layouts names "
    "this layout"
)


class Packed:
    """A tensor as it lies in device memory, with the layout that says how.

    Not a tensor: every torch function that gets one raises `LayoutError`. Its attributes can't be
    assigned; the numbers of `physical` may change.

    Args:
        physical: what the layout's `pack` made.
        layout: the record whose `pack` made it.
        shape: the logical shape.

    Raises:
        TypeError: the layout is no record.
        LayoutError: the physical tensor is not a plain one, or not what the layout makes of
            `shape`, as far as its `pack` can tell without the numbers.

    Example:
        >>> packed = pack(Layout(name="acme.t", role="embedding", pack="torch:t", unpack="torch:t"),
        ...               torch.ones(2, 3))
        >>> packed.shape, packed.physical.shape
        ((2, 3), torch.Size([3, 2]))
        >>> packed.unpack().shape
        torch.Size([2, 3])
    """

    physical: Tensor
    layout: Layout
    shape: tuple[int, ...]

    def __init__(self, physical: Tensor, layout: Layout, shape: Sequence[int]) -> None:
        _check_layout("Packed", layout)
        _check_physical(physical, layout)
        _check_shape(physical, layout, tuple(shape))
        self._hold(physical, layout, tuple(shape))

    @classmethod
    def _made(cls, physical: Tensor, layout: Layout, shape: Sequence[int]) -> Packed:
        """What the layout's own `pack` gave: its shape needs no second packing to check it."""
        packed = cls.__new__(cls)
        packed._hold(physical, layout, tuple(shape))
        return packed

    def _hold(self, physical: Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
        vars(self).update(physical=physical, layout=layout, shape=shape)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse_change(name)

    def __delattr__(self, name: str) -> NoReturn:
        self._refuse_change(name)

    def _refuse_change(self, name: str) -> NoReturn:
        raise LayoutError(
            f"Packed.{name} of {self.told()} can't change: what lies in device memory has one "
            "layout and one shape; make another with pack(layout, tensor)"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the physical tensor; a layout may store another than it was given."""
        return self.physical.dtype

    @property
    def device(self) -> torch.device:
        """Where the physical tensor lies."""
        return self.physical.device

    @property
    def nbytes(self) -> int:
        """Bytes of the physical tensor, padding included."""
        return self.physical.nbytes

    @property
    def padding(self) -> Padding:
        """What the layout adds to this shape."""
        return Padding(logical=self.shape, padded=tuple(self.physical.shape))

    def unpack(self) -> Tensor:
        """The logical tensor, a copy where anything moves."""
        assert self.layout.unpack is not None  # pack() refuses a layout without
        unpack = load_target(self.layout.unpack)
        if _takes_shape(unpack):
            plain: Tensor = unpack(self.physical, self.shape)
        else:
            plain = unpack(self.physical)
        if tuple(plain.shape) != self.shape:
            raise LayoutError(
                f"unpack of layout {self.layout.name} gave shape {tuple(plain.shape)}: expected "
                f"{self.shape}, the shape that was packed; mend {self.layout.unpack}"
            )
        return plain

    def __repr__(self) -> str:
        wasted = f", {self.padding.overhead:.2f}× its size" if self.padding.elements else ""
        kind = str(self.dtype).removeprefix("torch.")
        shape = tuple(self.physical.shape)
        return (
            f"Packed({self.layout.name}, {self.shape} as {shape} {kind} on {self.device}{wasted})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        packed = _first(cls, (*args, *(kwargs or {}).values()))
        name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        what = packed.told() if packed is not None else "a packed tensor"
        raise LayoutError(f"{name} got {what}: expected a plain tensor; {_REMEDY}")

    def told(self) -> str:
        """What error texts call it."""
        return f"a tensor of shape {self.shape} packed in layout {self.layout.name}"

    def __getattr__(self, name: str) -> NoReturn:
        # Reached only for what isn't here. Protocols are asked for by hasattr(), so they get the
        # usual error; what a plain tensor has gets the one that says what to do.
        if not name.startswith("__") and hasattr(Tensor, name):
            raise LayoutError(
                f"Tensor.{name} was asked of {self.told()}: expected a plain tensor; {_REMEDY}"
            )
        raise AttributeError(f"'Packed' object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor):
            self._refuse_operator("==")
        return self is other

    __hash__ = object.__hash__

    def _refuse_operator(self, operator: str) -> NoReturn:
        raise LayoutError(f"{operator} got {self.told()}: expected a plain tensor; {_REMEDY}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        # The layout's facts are a read-only mapping, which copy can't take; the record is frozen.
        twin = Packed._made(self.physical.clone(), self.layout, self.shape)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> NoReturn:
        raise LayoutError(
            f"{self.told()} can't be pickled, another process may not have the layout: {_REMEDY}"
        )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Packed, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_operator(name)

    return refuse


# Python looks operators up on the class, past __getattr__; and a tensor on the left gives way to
# the one on the right when its own operator raises a TypeError.
_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_UNARY = ("neg", "abs", "invert", "len", "iter", "bool", "float", "int", "getitem", "setitem")
# Without __array__, numpy would make an array of one object of it.
_ASKED = ("contains", "array")
_COMPARED = ("lt", "le", "gt", "ge")
for _name in (
    *(f"{side}{operator}" for operator in _BINARY for side in ("", "r", "i")),
    *_UNARY,
    *_ASKED,
    *_COMPARED,
):
    setattr(Packed, f"__{_name}__", _refusing(_name))


def pack(layout: Layout, tensor: Tensor) -> Packed:
    """The tensor in a layout.

    Raises:
        TypeError: not a layout record, or not a tensor.
        LayoutError: the tensor is packed already or sparse, or the layout packs nothing.
    """
    _check_layout("pack()", layout)
    if isinstance(tensor, Packed):
        raise LayoutError(
            f"pack() into {layout.name} got {tensor.told()}: expected a plain tensor; call "
            ".unpack() first"
        )
    if layout.pack is None:
        raise LayoutError(
            f"layout {layout.name} has no pack: its tensors are plain, use the tensor as it is"
        )
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"pack() into {layout.name} got a {type(tensor).__name__}: expected a torch.Tensor; "
            "make one with torch.tensor(...)"
        )
    if tensor.layout is not torch.strided:
        raise LayoutError(
            f"pack() into {layout.name} got a tensor of {tensor.layout}: expected a dense one; "
            "call .to_dense() first"
        )
    # A subclass (a Parameter above all) would make the physical tensor one too.
    plain = tensor.detach().as_subclass(Tensor)
    physical = load_target(layout.pack)(plain)
    _check_physical(physical, layout)
    return Packed._made(physical, layout, plain.shape)


def _check_layout(owner: str, layout: object) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{owner} got a {type(layout).__name__} as layout: expected a Layout record, such as "
            "the polysilicon_layouts hook of a plugin returns"
        )


def _check_physical(physical: object, layout: Layout) -> None:
    if type(physical) is not Tensor:
        raise LayoutError(
            f"Packed got a {type(physical).__name__} for layout {layout.name}: expected the "
            "plain torch.Tensor that its pack returns; call pack(layout, tensor)"
        )


def _check_shape(physical: Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
    """Refuses a logical shape of which the layout's own pack would make something else."""
    if any(size < 0 for size in shape):
        raise LayoutError(f"Packed got shape {shape}: expected the logical shape, sizes of 0 up")
    if layout.pack is None:
        return
    try:
        made = load_target(layout.pack)(torch.empty(shape, dtype=physical.dtype, device="meta"))
    except Exception:  # it needs the numbers, or another dtype: unpack() checks what it gives
        return
    if made.dtype == physical.dtype and made.shape != physical.shape:
        raise LayoutError(
            f"Packed got a physical tensor of shape {tuple(physical.shape)} for logical shape "
            f"{shape}: layout {layout.name} makes {tuple(made.shape)} of it; call "
            "pack(layout, tensor)"
        )


def packed_arguments(layouts: Mapping[str, Layout], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, those that `layouts` names packed: what a bound kernel takes."""
    return {
        name: pack(layouts[name], value) if name in layouts else value
        for name, value in arguments.items()
    }


def physical_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a kernel's own callable gets: physical tensors, and `<argument>_shape` after them."""
    packed = {name: value for name, value in arguments.items() if isinstance(value, Packed)}
    plain = {
        name: value.physical if isinstance(value, Packed) else value
        for name, value in arguments.items()
    }
    return plain | {f"{name}_shape": value.shape for name, value in packed.items()}


def accepting(kernel: str, names: Sequence[str], layouts: Mapping[str, str], function: Any) -> Any:
    """What a layer calls for a kernel that takes arguments packed.

    Args:
        kernel: the kernel's name, for errors.
        names: the op's arguments in order.
        layouts: argument → name of the layout in which it is taken.
        function: the callable with physical tensors and `<argument>_shape`.
    """
    places = {name: place for place, name in enumerate(names)}
    wanted = tuple((name, places[name], f"{name}_shape", layouts[name]) for name in layouts)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for name, place, shape, layout in wanted:
            value = given[place] if place < len(given) else kwargs.get(name)
            if not isinstance(value, Packed) or value.layout.name != layout:
                _refuse(kernel, name, layout, value)
            if place < len(given):
                given[place] = value.physical
            else:
                kwargs[name] = value.physical
            kwargs[shape] = value.shape
        return function(*given, **kwargs)

    return call


def _refuse(kernel: str, argument: str, layout: str, value: Any) -> NoReturn:
    if isinstance(value, Packed):
        came = value.told()
    elif isinstance(value, Tensor):
        came = f"a plain tensor of shape {tuple(value.shape)}"
    else:
        came = f"a {type(value).__name__}"
    raise LayoutError(
        f"kernel {kernel} takes {argument} in layout {layout} and got {came}: pack it with "
        f"pack(layout, tensor) and the layout {layout} of the device, or let prepare() do it"
    )


def _first(kind: type[Packed], values: Sequence[Any]) -> Packed | None:
    for value in values:
        if isinstance(value, kind):
            return value
        if isinstance(value, (tuple, list)) and (found := _first(kind, value)) is not None:
            return found
    return None


@functools.cache
def _takes_shape(unpack: Callable[..., Tensor]) -> bool:
    """Whether an unpack is told the logical shape, which padding hides."""
    try:
        return len(inspect.signature(unpack).parameters) > 1
    except ValueError:  # built in, e.g. torch.t
        return False
