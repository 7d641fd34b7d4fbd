"""A weight that lies packed, and the Parameters that stand for it as if it were plain.

A packed layer keeps one copy of its weight: the physical one. Its Parameters stay the same
objects, under the same names, without memory of their own: what reads one unpacks, what writes
one packs again, and what would need a gradient raises.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polysilicon.errors import LayoutError
from polysilicon.layers.weight_copy import as_copies
from polysilicon.layers.weight_copy import written as written_by
from polysilicon.packed import Packed, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from polysilicon.records import Layout


class RefusedLayout(LayoutError):
    """A layout can't hold a weight; `reason` completes "layout acme.x …"."""

    def __init__(self, layout: Layout, reason: str) -> None:
        super().__init__(
            f"layout {layout.name} {reason}: mend its pack ({layout.pack}) or its unpack "
            f"({layout.unpack})"
        )
        self.layout = layout
        self.reason = reason


class PackedWeight:
    """One packed matrix [out, in] and the Parameters whose rows it holds, in order.

    Args:
        layout: how it lies from now on.
        matrix: the weight as the op takes it; the Parameters' memory.
        parameters: each one's rows follow those of the one before.
        transposed: the one Parameter is [in, out].

    Raises:
        RefusedLayout: the layout can't hold this weight; nothing has changed.

    Attributes:
        layout: how it lies.
        where: dtype and device of the logical weight.
        packed: what the kernel gets; None once the Parameters were given memory again.
        trained: whether a Parameter wants a gradient, which a packed weight has not.
    """

    packed: Packed | None

    def __init__(
        self,
        layout: Layout,
        matrix: Tensor,
        parameters: Sequence[nn.Parameter],
        *,
        transposed: bool = False,
    ) -> None:
        assert not transposed or len(parameters) == 1
        self.layout = layout
        self.dtype, self.transposed = matrix.dtype, transposed
        self.where = matrix.dtype, matrix.device
        with torch.no_grad(), torch.inference_mode(matrix.is_inference()):
            self.packed = _pack_proven(layout, matrix)
        self.parameters = list(parameters)
        self.sizes = [p.shape[1 if transposed else 0] for p in self.parameters]
        for parameter in self.parameters:
            _hide(parameter, self)
        self.trained = any(p.requires_grad for p in self.parameters)

    def argument(self) -> Packed:
        """The weight as a kernel takes it.

        Raises:
            LayoutError: a gradient is wanted of it, or a Parameter got other memory.
        """
        packed = self.whole()
        if self.trained and torch.is_grad_enabled():
            _refuse_gradient(packed)
        return packed

    def release(self) -> None:
        """Gives the Parameters their memory back, rows of one matrix; the packed copy goes."""
        packed, inference = self.whole(), self.parameters[0].is_inference()
        with torch.no_grad(), torch.inference_mode(inference):
            plain = packed.unpack().to(self.dtype)
        self.packed = None
        for parameter, rows in zip(self.parameters, torch.split(plain, self.sizes), strict=True):
            _show(parameter, rows.t() if self.transposed else rows)

    def read(self, parameter: Tensor) -> Tensor:
        """The logical value of one Parameter, a copy where anything moves."""
        whole = self.whole().unpack().to(self.dtype)
        if self.transposed:
            return whole.t().contiguous()
        # Rows of a larger matrix are copied, or each would keep all of it alive.
        return whole if len(self.sizes) == 1 else whole[self._rows(parameter)].clone()

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Packs another value of one Parameter, in place: graphs keep their addresses.

        Raises:
            RefusedLayout: the layout can't hold that value; the one before stays.
        """
        packed = self.whole()
        with torch.inference_mode():  # neither versions nor gradients: no one may see them
            value = value.t() if self.transposed else value
            if len(self.sizes) > 1:
                whole = packed.unpack().to(self.dtype).clone()
                whole[self._rows(parameter)] = value
                value = whole
            packed.physical.copy_(_pack_proven(packed.layout, value).physical)

    def whole(self) -> Packed:
        """The packed matrix, where the Parameters still stand for it.

        Raises:
            LayoutError: a Parameter got other memory.
        """
        if self.packed is None:
            raise LayoutError(
                "a packed weight was given other memory (an assignment to .data): call prepare() "
                "again before the model runs"
            )
        return self.packed

    def _rows(self, parameter: Tensor) -> slice:
        place = next(i for i, own in enumerate(self.parameters) if own is parameter)
        start = sum(self.sizes[:place])
        return slice(start, start + self.sizes[place])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        twin = PackedWeight.__new__(PackedWeight)
        memo[id(self)] = twin
        twin.__dict__ |= self.__dict__ | {"packed": copy.deepcopy(self.packed, memo)}
        twin.parameters = [_stand_in(own, twin) for own in self.parameters]
        memo.update(zip(map(id, self.parameters), twin.parameters, strict=True))
        return twin


def packed_weight_of(parameter: object) -> PackedWeight | None:
    """The packed weight that a Parameter stands for; None where it is plain."""
    return parameter.packed_weight if isinstance(parameter, PackedParameter) else None


class PackedParameter(nn.Parameter):
    """A Parameter whose numbers lie in a `PackedWeight`; made and unmade in place.

    Torch functions get its logical value: a copy. One that writes to it packs the result again;
    views, `.detach()` and `.data` are a `WeightCopy`, which can't be written to.
    """

    packed_weight: PackedWeight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ABOUT:
            return _about(func, args, kwargs)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            of_it: PackedWeight = args[0].packed_weight
            of_it.release()
            args[0].data = args[1]
            return None
        if func in _ADDRESSES:
            raise LayoutError(
                f"Tensor.{func.__name__} was asked of {args[0]!r}: it has no memory of its own, "
                "expected a plain tensor; read it with .detach(), or make it plain with unpack() "
                "of its layer or undo() of its model. A compiled graph can't hold it either"
            )
        written = [
            value for value in written_by(func, args, kwargs) if isinstance(value, PackedParameter)
        ]
        read = _Reading(writes=bool(written))
        args, kwargs = tree_map_only(PackedParameter, read, (args, kwargs))
        result = func(*args, **kwargs)
        for parameter in written:
            parameter.packed_weight.write(parameter, read.seen[id(parameter)])
            if result is read.seen[id(parameter)]:
                result = parameter
        return as_copies(func, result, read.seen.values(), read.layout)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    # torch's own has no annotations, which mypy takes for another signature.
    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        layout = self.packed_weight.layout.name
        return f"PackedParameter({layout}, {tuple(self.shape)} {self.dtype} on {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy.deepcopy(self.packed_weight, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Another process may not have the layout: it gets the logical value.
        value = self.packed_weight.read(self)
        return torch._utils._rebuild_parameter, (value, self.requires_grad, OrderedDict())


class _Reading:
    """Logical values of the packed Parameters in one call's arguments."""

    def __init__(self, *, writes: bool) -> None:
        self.seen: dict[int, Tensor] = {}
        self.layout = ""
        self._gradients = torch.is_grad_enabled() and not writes

    def __call__(self, parameter: PackedParameter) -> Tensor:
        if id(parameter) not in self.seen:
            self.seen[id(parameter)] = self._read(parameter)
        return self.seen[id(parameter)]

    def _read(self, parameter: PackedParameter) -> Tensor:
        weight = parameter.packed_weight
        self.layout = weight.layout.name
        with torch.no_grad():
            value = weight.read(parameter)
        if self._gradients and not value.is_inference() and parameter.requires_grad:
            value.requires_grad_()
            packed = weight.whole()
            # torch ships without annotations for it.
            value.register_hook(lambda gradient: _refuse_gradient(packed))  # type: ignore[no-untyped-call]
        return value


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
    *("requires_grad", "grad", "grad_fn", "output_nr", "retains_grad"),
    # Where a tensor lies, by whatever names this PyTorch has for that.
    *(
        name
        for name, value in vars(torch._C.TensorBase).items()
        if name.startswith("is_") and inspect.isgetsetdescriptor(value)
    ),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "requires_grad_"),
)
#: What is as true of a Parameter without memory.
_ABOUT = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(Tensor, name) for name in _METHODS),
}
_TRAINED = {Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
_ADDRESSES = {
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.storage_offset,
    Tensor.__dlpack__,
}


def _about(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        if isinstance(args[0], PackedParameter) and func in _TRAINED:
            weight = args[0].packed_weight
            weight.trained = any(p.requires_grad for p in weight.parameters)
    return result


def _pack_proven(layout: Layout, matrix: Tensor) -> Packed:
    """A weight packed, once its unpack has given back the same bits: nothing else keeps them.

    Looked at on every weight: whether a layout is right, or loses nothing of what it converts,
    depends on the shape and on the values.
    """
    from polysilicon.proof import off  # the proof binds kernels, whose layers need this module

    try:
        packed = pack(layout, matrix)
        same = off() or _same_bits(packed.unpack().to(matrix.dtype), matrix)
    except Exception as error:
        raise RefusedLayout(layout, f"raised {type(error).__name__}: {error}") from error
    if not same:
        raise RefusedLayout(layout, "does not give back what was packed")
    return packed


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes: NaNs and signs of zeros count."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.device == b.device and torch.equal(a.view(integers), b.detach().view(integers))


def _hide(parameter: nn.Parameter, weight: PackedWeight) -> None:
    """Takes a Parameter's memory away: what gets past the torch functions finds NaNs only."""
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        nothing = torch.tensor(float("nan")).to(parameter.dtype).to(parameter.device)
        parameter.data = nothing.expand(parameter.shape)
    # As torch's own lazy Parameters become what they are: the object, its name and ties stay.
    parameter.__class__ = PackedParameter
    parameter.packed_weight = weight  # type: ignore[attr-defined]


def _show(parameter: nn.Parameter, value: Tensor) -> None:
    del vars(parameter)["packed_weight"]
    parameter.__class__ = nn.Parameter
    parameter.data = value


def _stand_in(parameter: nn.Parameter, weight: PackedWeight) -> nn.Parameter:
    with torch._C.DisableTorchFunctionSubclass():
        twin = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    twin.__class__ = PackedParameter
    twin.packed_weight = weight  # type: ignore[attr-defined]
    return twin


def _refuse_gradient(packed: Packed) -> NoReturn:
    raise LayoutError(
        f"a gradient was wanted of {packed.told()}: a packed weight is for inference; call the "
        "model under torch.inference_mode() or torch.no_grad(), freeze it with "
        "requires_grad_(False), or train before prepare()"
    )
