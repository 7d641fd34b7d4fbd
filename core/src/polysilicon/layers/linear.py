"""Linear layers, alone and merged: several projections of one input as one product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysilicon.errors import LayoutError
from polysilicon.layers.base import check_matrix, check_vector, dtype_name
from polysilicon.layers.packed_weight import PackedWeight, packed_weight_of
from polysilicon.layers.product import Product
from polysilicon.ops import linear
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from polysilicon.packed import Packed
    from polysilicon.records import Layout


def _problem(out: int, width: int, dtype: torch.dtype, bias: bool) -> Problem:
    facts = {"out": out, "in": width, "bias": bias}
    return Problem(op="linear", dtype=dtype_name(dtype), facts=facts)


class Linear(Product):
    """x · weightᵀ + bias with existing Parameters.

    Args:
        weight: [out, in]; [in, out] when `transposed`.
        bias: [out], or None.
        transposed: the weight is stored as GPT-2's Conv1D stores it.

    Raises:
        TypeError, ValueError: weight or bias of the wrong kind or shape.
    """

    weight: nn.Parameter | Tensor
    bias: nn.Parameter | Tensor | None

    def __init__(
        self,
        weight: nn.Parameter | Tensor,
        bias: nn.Parameter | Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        check_matrix("Linear", "weight", weight)
        check_vector("Linear", "bias", bias, weight.shape[1 if transposed else 0])
        self.weight = weight
        self.bias = bias
        self.transposed = transposed
        self.bind_kernel("linear", linear.torch_kernel)

    @property
    def in_features(self) -> int:
        """Size of the last dim of the input (nn.Linear's name for it, which model code reads)."""
        return int(self.weight.shape[0 if self.transposed else 1])

    @property
    def out_features(self) -> int:
        """Size of the last dim of the output."""
        return int(self.weight.shape[1 if self.transposed else 0])

    def problems(self) -> dict[str, Problem]:
        bias = self.bias is not None
        return {"linear": _problem(self.out_features, self.in_features, self.weight.dtype, bias)}

    def weights(self, attribute: str) -> dict[str, tuple[Tensor, ...]]:
        return {"weight": (self.weight,)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        if self.packed_weight is not None:
            weight: Tensor | Packed = self.packed_weight.argument()
        else:
            weight = self.weight.t() if self.transposed else self.weight
        y: Tensor = self.linear(x, weight, self.bias)
        return y

    def _pack(self, layout: Layout) -> PackedWeight:
        assert isinstance(self.weight, nn.Parameter)  # prepare() packs nothing else
        matrix = self.weight.data.t() if self.transposed else self.weight.data
        return PackedWeight(layout, matrix, [self.weight], transposed=self.transposed)

    def _own(self) -> PackedWeight | None:
        found = packed_weight_of(self.weight)
        # One of several rows belongs to the merged product that holds them all.
        return found if found is not None and len(found.sizes) == 1 else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.packed_weight is not None:
            self.unpack()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        again = self._made_plain()
        super()._apply(fn, recurse)
        again()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        again = self._made_plain()
        super()._load_from_state_dict(*args, **kwargs)
        again()

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, bias={self.bias is not None}"


class MergedLinear(Product):
    """Several linears of the same input as one product over one storage.

    The parts stay the owners of their Parameters: same objects, same names, same ties; only
    their memory becomes rows of one matrix. So `state_dict`, saving, undo and later moves see
    nothing but the parts, and no second copy exists. This layer registers no parameter; register
    it beside its parts, after them, so that moving or loading a model reaches it last.

    With gradients on, the parts run one by one, so that each Parameter gets its gradient.

    Args:
        parts: modules with `.weight` [out, in] and `.bias` [out] or None, in output order.

    Raises:
        TypeError, ValueError: fewer than two parts, inputs of different size, dtype or device, one
            Parameter used twice, or a tensor subclass (quantised weights need their own layer).
    """

    parts: tuple[Any, ...]
    merged_weight: Tensor | None  # None where it lies packed
    merged_bias: Tensor | None

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        # A tuple, not a ModuleList: the parts are registered where the model has them.
        self.parts = tuple(parts)
        _check_parts(self.parts)
        self.sizes = [int(part.weight.shape[0]) for part in self.parts]
        self.merge()
        self.bind_kernel("linear", linear.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        first, bias = self.parts[0].weight, any(part.bias is not None for part in self.parts)
        return {"linear": _problem(sum(self.sizes), first.shape[1], first.dtype, bias)}

    def weights(self, attribute: str) -> dict[str, tuple[Tensor, ...]]:
        return {"weight": tuple(part.weight for part in self.parts)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., sum of the parts' out]; `split` takes it apart."""
        if self.packed_weight is not None:
            packed: Tensor = self.linear(x, self.packed_weight.argument(), self.merged_bias)
            return packed
        if torch.is_grad_enabled() and self.parts[0].weight.requires_grad:
            return torch.cat([self.linear(x, p.weight, p.bias) for p in self.parts], dim=-1)
        y: Tensor = self.linear(x, self.merged_weight, self.merged_bias)
        return y

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of a result of `forward`, one a part."""
        return torch.split(y, self.sizes, dim=-1)

    def is_merged(self) -> bool:
        """Whether every part's weight and bias still lie in the merged storage."""
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts if part.bias is not None]
        if self.packed_weight is not None:
            held = self.packed_weight.packed is not None and self._own() is self.packed_weight
        else:
            held = self.merged_weight is not None and _lie_in(self.merged_weight, weights)
        return held and (self.merged_bias is None or _lie_in(self.merged_bias, biases))

    @torch.no_grad()
    def merge(self) -> None:
        """Lays the parts' weights out as rows of one matrix and points their Parameters at it."""
        if self.packed_weight is not None:
            self.unpack()
            return
        self.merged_weight = _gather([part.weight for part in self.parts])
        self._merge_bias()
        self._point_parts()

    def _merge_bias(self) -> None:
        self.merged_bias = None
        if all(part.bias is None for part in self.parts):
            return
        first = self.parts[0].weight
        pieces = [
            part.bias
            if part.bias is not None
            else torch.zeros(size, dtype=first.dtype, device=first.device)
            for part, size in zip(self.parts, self.sizes, strict=True)
        ]
        self.merged_bias = _gather(pieces)

    def _point_parts(self) -> None:
        """Makes the parts' Parameters rows of the merged tensors, where these are plain."""
        if self.merged_weight is not None:
            rows = torch.split(self.merged_weight, self.sizes)
            for part, weight in zip(self.parts, rows, strict=True):
                part.weight.data = weight
        if self.merged_bias is None:
            return
        for part, bias in zip(self.parts, torch.split(self.merged_bias, self.sizes), strict=True):
            if part.bias is not None:
                part.bias.data = bias

    def unpack(self) -> None:
        if self.packed_weight is not None:
            super().unpack()
            self.merge()

    def _pack(self, layout: Layout) -> PackedWeight:
        if not self.is_merged():
            self.merge()
        assert self.merged_weight is not None
        packed = PackedWeight(layout, self.merged_weight, [part.weight for part in self.parts])
        self.merged_weight = None
        return packed

    def _own(self) -> PackedWeight | None:
        found = {packed_weight_of(part.weight) for part in self.parts}
        return found.pop() if len(found) == 1 else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        again = self._made_plain()
        super()._apply(fn, recurse)
        if self.is_merged():
            assert self.merged_weight is not None
            self.merged_weight = fn(self.merged_weight)
            if self.merged_bias is not None:
                self.merged_bias = fn(self.merged_bias)
            self._point_parts()
        else:  # the parts were moved first
            self.merge()
        self._leave_kernels()
        again()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.is_merged():  # load_state_dict(assign=True) put new Parameters in place
            again = self._made_plain()
            self.merge()
            again()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Parts copy their Parameters one by one; the copy lays out its own storage again.
        del state["merged_weight"], state["merged_bias"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.packed_weight is None:
            self.merge()
            return
        self.merged_weight = None
        with torch.no_grad():
            self._merge_bias()
            self._point_parts()

    def extra_repr(self) -> str:
        return f"{self.parts[0].weight.shape[1]} → {' + '.join(map(str, self.sizes))}"


def _gather(pieces: Sequence[Tensor]) -> Tensor:
    """One tensor whose rows are the pieces; the pieces' own storage if it is that already."""
    first = pieces[0]
    whole = (
        first.new_empty(0).set_(
            first.untyped_storage(),
            first.storage_offset(),
            (sum(p.shape[0] for p in pieces), *first.shape[1:]),
            first.stride(),
        )
        if _fits(pieces)
        else None
    )
    if whole is not None and _lie_in(whole, pieces):
        return whole
    return torch.cat([piece.detach() for piece in pieces])


def _fits(pieces: Sequence[Tensor]) -> bool:
    """Whether the storage of the first piece is large enough to hold all of them in a row."""
    first = pieces[0]
    if first.is_meta or not first.is_contiguous():
        return False
    needed = first.storage_offset() + sum(piece.numel() for piece in pieces)
    return bool(needed * first.element_size() <= first.untyped_storage().nbytes())


def _lie_in(whole: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Whether the pieces are parts of the storage of `whole`, rows in order when complete."""
    storage = whole.untyped_storage().data_ptr()
    same_kind = all(p.dtype == whole.dtype and p.device == whole.device for p in pieces)
    if not same_kind or any(p.untyped_storage().data_ptr() != storage for p in pieces):
        return False
    if sum(p.shape[0] for p in pieces) != whole.shape[0]:
        return True
    offset = whole.storage_offset()
    for piece in pieces:
        if piece.storage_offset() != offset or not piece.is_contiguous():
            return False
        offset += piece.numel()
    return True


def _check_parts(parts: Sequence[Any]) -> None:
    if len(parts) < 2:
        raise ValueError(f"MergedLinear: got {len(parts)} parts, expected two or more")
    first = parts[0].weight
    for index, part in enumerate(parts):
        name = f"weight of part {index}"
        check_matrix("MergedLinear", name, part.weight)
        if (packed := packed_weight_of(part.weight)) is not None:
            raise LayoutError(
                f"MergedLinear: {name} lies packed in {packed.layout.name}: call unpack() on its "
                "layer first"
            )
        check_vector("MergedLinear", f"bias of part {index}", part.bias, part.weight.shape[0])
        if type(part.weight.data) is not Tensor:
            raise TypeError(
                f"MergedLinear: {name} is a {type(part.weight.data).__name__}: plain only"
            )
        for what in ("dtype", "device"):
            if getattr(part.weight, what) != getattr(first, what):
                raise ValueError(
                    f"MergedLinear: {name} has {what} {getattr(part.weight, what)}, part 0 has "
                    f"{getattr(first, what)}: they must be equal"
                )
        if part.weight.shape[1] != first.shape[1]:
            raise ValueError(
                f"MergedLinear: {name} takes {part.weight.shape[1]} inputs, part 0 takes "
                f"{first.shape[1]}: only projections of the same input can be merged"
            )
    if len({id(part.weight) for part in parts}) != len(parts):
        raise ValueError("MergedLinear: two parts share one Parameter: it cannot lie in two places")
