"""What layers of quantised weights share: tensors under a checkpoint's names, never cast."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysilicon import formats
from polysilicon.codes import decode_to, out_features
from polysilicon.layers.base import Layer, dtype_name, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self

    from polysilicon.records import Format


class StoredWeight:
    """Which tensors of a layer are one quantised weight, or one for each of several experts.

    Args:
        owner: the layer, for errors.
        stored: the format.
        activation: the format in which the input is multiplied; empty for none.
        tensors: name in the checkpoint → tensor; the names are looked up in `formats.CODES`.
        in_features: K, needed where neither the tensors' shapes nor `weight_shape` tell it.
        names: argument of the ops → name among `tensors`, or what is put before the usual names.
        experts: the leading dim of every tensor; None for one weight.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape than the format says.
        TypeError: a tensor is of another dtype than the format says.
    """

    def __init__(
        self,
        owner: str,
        stored: Format,
        activation: str,
        tensors: Mapping[str, Tensor],
        *,
        in_features: int | None = None,
        names: Mapping[str, str] | str = "",
        experts: int | None = None,
    ) -> None:
        self.owner, self.stored, self.activation = owner, formats.checked(stored), activation
        self.experts = experts
        self.names = _found(owner, stored, tensors, names)
        given = {argument: tensors[name] for argument, name in self.names.items()}
        self.rows = out_features(stored, given["weight"])
        self.columns = _columns(owner, stored, given, in_features)
        self.act_order = False
        self._check(given)
        self.look(tensors)

    def look(self, tensors: Mapping[str, Tensor]) -> None:
        """Looks at the values of tensors that decide how the weight is read.

        Raises:
            ValueError: an input's group is none that there is.
        """
        name = self.names.get("g_idx")
        g_idx = None if name is None else tensors[name]
        if g_idx is None or not g_idx.numel():
            self.act_order = False
        elif g_idx.is_meta:  # not known before it is loaded
            self.act_order = True
        else:
            self.act_order = _unordered(self.owner, self.stored, g_idx.reshape(-1, self.columns))

    def arguments(self, layer: nn.Module) -> dict[str, Tensor | None]:
        """weight, scale, zeros, g_idx and input_scale, as the ops take them."""
        return {
            argument: self._tensor(layer, argument)
            for argument in ("weight", "scale", "zeros", "g_idx", "input_scale")
        }

    def _tensor(self, layer: nn.Module, argument: str) -> Tensor | None:
        name = self.names.get(argument)
        if name is None or (argument == "g_idx" and not self.act_order):
            return None
        found: Tensor = getattr(layer, name)
        return found

    def facts(self) -> dict[str, Any]:
        """What a problem states of this weight."""
        return {
            "in": self.columns,
            "out": self.rows,
            "format": str(self.stored),
            "activation": self.activation,
            "act_order": self.act_order,
        }

    def dense(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """The weight that the tensors stand for: [out, in], or [experts, out, in]."""
        weight, scale, zeros, g_idx, _ = self.arguments(layer).values()
        assert weight is not None
        assert scale is not None

        def one(weight: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
            return decode_to(dtype, self.stored, weight, scale, zeros, g_idx, self.columns)

        if self.experts is None:
            return one(weight, scale, zeros)
        every = range(self.experts)
        return torch.stack(
            [one(weight[e], scale[e], None if zeros is None else zeros[e]) for e in every]
        )

    def _check(self, given: Mapping[str, Tensor]) -> None:
        leading = () if self.experts is None else (self.experts,)
        allowed = formats.shapes(self.stored, self.rows, self.columns)
        for argument, tensor in given.items():
            wanted = allowed[argument]
            # One order of inputs, and one static scale, serve all experts.
            lead = () if argument in ("g_idx", "shape", "input_scale") else leading
            if tuple(tensor.shape) not in {(*lead, *shape) for shape in wanted}:
                raise ValueError(
                    f"{self.owner}: {self.names[argument]} has shape {tuple(tensor.shape)}, "
                    f"expected {(*lead, *wanted[0])} for [{self.rows}, {self.columns}] in "
                    f"{self.stored}"
                )
            _check_dtype(self.owner, self.names[argument], argument, tensor, self.stored)
        if self.activation.partition("/")[2].startswith("tensor") != ("input_scale" in given):
            raise ValueError(
                f"{self.owner}: activations in {self.activation or 'their own dtype'} and "
                f"{'a' if 'input_scale' in given else 'no'} static scale (input_scale): a scale "
                "is given exactly where the format's granularity is tensor"
            )


def _found(
    owner: str, stored: Format, tensors: Mapping[str, Tensor], names: Mapping[str, str] | str
) -> dict[str, str]:
    """Argument → the name among `tensors`."""
    if isinstance(names, str):
        usual = formats.code_of(stored).names
        known = {arg: tuple(names + name for name in usual[arg]) for arg in usual}
    else:
        known = {argument: (name,) for argument, name in names.items()}
    found = {
        argument: name
        for argument, candidates in known.items()
        for name in candidates
        if name in tensors
    }
    listed = ", ".join("/".join(candidates) for candidates in known.values())
    unknown = sorted(name for name in tensors if name not in found.values())
    if unknown:
        raise ValueError(f"{owner}: {', '.join(unknown)} belong to no {stored}: it has {listed}")
    needed = {"weight", "scale"} | ({"zeros"} if stored.zero_points else set())
    missing = sorted(known.get(argument, (argument,))[0] for argument in needed - set(found))
    if missing:
        raise ValueError(f"{owner}: {stored} needs {', '.join(missing)}: it has {listed}")
    if "zeros" in found and not stored.zero_points:
        raise ValueError(
            f"{owner}: {found['zeros']} is given and {stored} says that there are no zero points: "
            f"write {stored}/zeros"
        )
    return found


def _columns(
    owner: str, stored: Format, given: Mapping[str, Tensor], in_features: int | None
) -> int:
    """K of a stored weight."""
    weight, per_word = given["weight"], 32 // formats.code_of(stored).bits
    if stored.packing == "compressed_tensors":
        shape = given.get("shape")
        if shape is not None and not shape.is_meta:
            return int(shape.reshape(-1)[-1])
        if in_features is None:
            raise ValueError(
                f"{owner}: {stored} fills up its last word: give weight_shape or in_features"
            )
        return in_features
    if stored.packing == "awq":
        columns = weight.shape[-2]
    elif stored.packing:
        columns = weight.shape[-2] * per_word
    elif stored.logical == "mxfp4":
        columns = weight.shape[-2] * 32
    else:
        columns = weight.shape[-1]
    if in_features not in (None, columns):
        raise ValueError(f"{owner}: the weight takes {columns} inputs, in_features {in_features}")
    return int(columns)


def _check_dtype(owner: str, name: str, argument: str, tensor: Tensor, stored: Format) -> None:
    wanted = {
        "weight": (stored.dtype,),
        "zeros": ("int32",),
        "g_idx": ("int32", "int64"),
        "shape": ("int32", "int64"),
        "scale": (str(stored.scale_dtype),),
        "input_scale": ("float32", "bfloat16", "float16"),
    }[argument]
    if stored.logical == "mxfp4":
        wanted = ("uint8", *wanted) if argument == "scale" else wanted
    if dtype_name(tensor.dtype) not in wanted:
        raise TypeError(
            f"{owner}: {name} is {kind_of(tensor)}, expected {' or '.join(wanted)} for {stored}"
        )


def _unordered(owner: str, stored: Format, g_idx: Tensor) -> bool:
    """Whether groups aren't runs of inputs."""
    columns = g_idx.shape[-1]
    size = formats.block_of(stored)[1] or columns
    groups = -(-columns // size)
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(
            f"{owner}: g_idx names group {low if low < 0 else high}, and {columns} inputs in "
            f"{stored} have groups 0 to {groups - 1}"
        )
    return not bool((g_idx == torch.arange(columns, device=g_idx.device) // size).all())


class QuantizedLayer(Layer):
    """A layer whose tensors are a checkpoint's own, under its names.

    Casting the layer changes the dtype of what it computes in, and leaves the stored tensors.
    """

    stored: dict[str, StoredWeight]
    dtype_mark: Tensor
    #: Whether inputs are rounded to the format of activations, where there is one.
    rounds: bool = True

    def hold(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Registers tensors under their names: Parameters as they are, others as buffers."""
        for name, tensor in tensors.items():
            self.register_tensor(name, tensor)
        # Follows .to(dtype), so that problems() states the model's dtype; never saved.
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)

    def look(self) -> None:
        """Looks at the values of tensors that decide how they are read, after they were set."""
        held = self._held()
        for weight in self.stored.values():
            weight.look(held)

    def _held(self) -> dict[str, Tensor]:
        names = {name for weight in self.stored.values() for name in weight.names.values()}
        return {name: getattr(self, name) for name in names}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {id(tensor) for tensor in self._held().values()}

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept and result.dtype != tensor.dtype:
                return tensor.to(result.device)
            return result

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.look()


@contextmanager
def unrounded(model: nn.Module) -> Iterator[bool]:
    """Lets every layer multiply its input as it is, by the portable kernels; yields if any rounded.

    For comparing what is around them: a rounded input makes a large difference of the smallest one.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, QuantizedLayer)
        and any(weight.activation for weight in layer.stored.values())
    ]
    try:
        for layer in layers:
            layer.rounds = False
        yield bool(layers)
    finally:
        for layer in layers:
            layer.rounds = True
