"""Quantised weights of a mixture, an expert each, as the stacks that a layer of experts holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polysilicon import formats
from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from polysilicon.loading.quantized_tensors import Part, Weight
    from polysilicon.loading.safetensors_folder import Entry
    from polysilicon.records import Format

    Read = Callable[[Entry], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Tensors that become one [E, ...]: `lazy.StackedTensor` says how."""

    experts: tuple[tuple[Entry, ...], ...]
    dim: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def stacked_format(folder: Path, weights: list[Weight]) -> Format:
    """The one format of all the experts' weights, stacked.

    Raises:
        LoadError: they differ, or something of them can't be stacked.
    """
    first = weights[0]
    for other in weights:
        if (other.stored, other.activation) != (first.stored, first.activation):
            raise LoadError(
                f"{folder}: {first.name} is {first.stored} and {other.name} {other.stored}: "
                "experts of one layer that differ in format are not supported"
            )
    if "input_scale" in first.parts:
        raise LoadError(
            f"{folder}: {first.name} has a static scale of its input "
            f"({first.parts['input_scale'].full}), which differs between experts: not supported; "
            "use a checkpoint whose activations are quantised dynamically, or an unquantised one"
        )
    if first.stored.granularity == "tensor":
        # Parts that are joined have a scale each: every row gets its own.
        return formats.parse(f"{first.stored.logical}/channel/{first.stored.scale_dtype}")
    return first.stored


def stack(
    folder: Path, name: str, stored: Format, experts: list[list[Weight]], read: Read
) -> dict[str, tuple[Part, Entry | Stack]]:
    """Argument → (its tensor in the first expert, all of them stacked), for one product.

    Args:
        folder: for errors.
        name: of the stacked parameter, for errors.
        stored: what `stacked_format` gave.
        experts: of each expert, the weights whose rows follow one another.
        read: gives a tensor's values.

    Raises:
        LoadError: the rows of two weights share a word or a scale, or experts differ in the order
            of their inputs.
    """
    heights = [_rows(weight) for weight in experts[0]]
    step = _joint(stored)
    if any(height % step for height in heights[:-1]):
        raise LoadError(
            f"{folder}: {name} is made of weights of {heights} rows and {stored} stores {step} "
            "rows together: not supported"
        )
    found: dict[str, tuple[Part, Entry | Stack]] = {}
    for argument, part in experts[0][0].parts.items():
        if argument == "shape":  # of one expert; the layer is told its own
            continue
        if argument == "g_idx":
            found[argument] = part, _one_order(folder, experts, read)
            continue
        parts = tuple(tuple(w.parts[argument].entry for w in expert) for expert in experts)
        found[argument] = part, _joined(experts[0][0].stored, argument, parts, heights)
    return found


def _one_order(folder: Path, experts: list[list[Weight]], read: Read) -> Entry:
    """The group of each input, which a layer of experts holds once."""
    first = experts[0][0].parts["g_idx"]
    usual = read(first.entry)
    for expert in experts:
        for weight in expert:
            part = weight.parts["g_idx"]
            if not read(part.entry).equal(usual):
                raise LoadError(
                    f"{folder}: {part.full} has another order of inputs than {first.full} "
                    "(desc_act, actorder): experts with an order each are not supported; use a "
                    "checkpoint without it"
                )
    return first.entry


def _joined(
    own: Format, argument: str, parts: tuple[tuple[Entry, ...], ...], heights: list[int]
) -> Stack:
    first = parts[0]
    dim = 1 if own.packing in ("gptq", "gptq_v2", "awq") else 0
    if argument == "scale" and own.granularity == "tensor":
        shape, sizes = [0, 1], heights
    else:
        shape, sizes = list(first[0].shape), [entry.shape[dim] for entry in first]
    shape[dim] = sum(sizes)
    return Stack(
        experts=parts,
        dim=dim,
        sizes=tuple(sizes),
        shape=(len(parts), *shape),
        dtype=first[0].dtype,
    )


def _rows(weight: Weight) -> int:
    shape, packing = weight.parts["weight"].entry.shape, weight.stored.packing
    if packing == "awq":
        return shape[1] * 8
    return shape[1] if packing.startswith("gptq") else shape[0]


def _joint(stored: Format) -> int:
    """Rows of a weight that share a stored number."""
    if stored.packing == "awq" or (stored.packing and stored.zero_points):
        return 32 // formats.code_of(stored).bits
    return max(1, formats.block_of(stored)[0])


def check_shapes(folder: Path, experts: list[list[Weight]]) -> None:
    """Refuses experts that are not of one shape.

    Raises:
        LoadError: names the tensor that differs.
    """
    usual = [_shapes(weight) for weight in experts[0]]
    for expert in experts:
        for weight, wanted in zip(expert, usual, strict=True):
            if _shapes(weight) != wanted:
                raise LoadError(
                    f"{folder}: the tensors of {weight.name} are {_shapes(weight)}, those of the "
                    f"first expert {wanted}: expected the same of all"
                )


def _shapes(weight: Weight) -> dict[str, tuple[int, ...]]:
    return {argument: part.entry.shape for argument, part in sorted(weight.parts.items())}
