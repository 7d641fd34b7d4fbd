"""Which tensors of a checkpoint are quantised weights, and in which format each weight is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polysilicon import formats
from polysilicon.errors import LoadError, RecordError
from polysilicon.layers.base import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from polysilicon.loading.quantized_config import Quantization, Scheme
    from polysilicon.loading.safetensors_folder import Entry
    from polysilicon.records import Format

#: Method → codes whose tensors' names a checkpoint of it may use.
_CODES = {
    "gptq": ("int4.gptq",),
    "awq": ("int4.awq",),
    "compressed-tensors": ("int4.compressed_tensors", "int8"),
    "fp8": ("fp8_e4m3fn",),
    "mxfp4": ("mxfp4",),
}
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a quantised weight.

    Attributes:
        full: name in the checkpoint.
        name: name in the layer that holds it.
        entry: where it lies.
    """

    full: str
    name: str
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One quantised weight of a checkpoint.

    Attributes:
        name: the plain tensor that it stands for, e.g. `model.layers.0.self_attn.q_proj.weight`.
        parts: argument of the ops → its tensor.
        stored: the format.
        activation: format in which the input is multiplied; empty for the input as it is.
    """

    name: str
    parts: Mapping[str, Part]
    stored: Format
    activation: str


def find_weights(
    folder: Path, entries: Mapping[str, Entry], quantization: Quantization
) -> list[Weight]:
    """Every quantised weight among a checkpoint's tensors.

    Raises:
        LoadError: tensors are missing or not as the config says, or there is no such weight.
    """
    found = [
        _weight(folder, name, parts, quantization)
        for name, parts in _grouped(entries, quantization.method).items()
        if "scale" in parts
    ]
    if not found:
        raise LoadError(
            f"{folder}/config.json says that weights are quantised ({quantization.method}) and "
            "the checkpoint has no tensors of that method: config and weights are of different "
            "models"
        )
    return found


def plain_tensors(
    folder: Path, entries: Mapping[str, Entry], weights: list[Weight]
) -> dict[str, Entry]:
    """The tensors that belong to no quantised weight.

    Raises:
        LoadError: one holds quantised numbers, which would be read as plain ones.
    """
    theirs = {part.full for weight in weights for part in weight.parts.values()}
    left = {name: entry for name, entry in entries.items() if name not in theirs}
    for name, entry in left.items():
        if entry.dtype.is_floating_point and entry.dtype not in _PLAIN:
            raise LoadError(
                f"{folder}: {name} is stored as {dtype_name(entry.dtype)} and no scale belongs to "
                "it: quantised weights need the quantization_config of their config.json; fetch "
                "the checkpoint again"
            )
    return left


def _grouped(entries: Mapping[str, Entry], method: str) -> dict[str, dict[str, Part]]:
    """Plain name → argument → tensor, for all names that may be of a weight."""
    arguments = {
        name: argument
        for code in _CODES[method]
        for argument, names in formats.CODES[code].names.items()
        for name in names
    }
    found: dict[str, dict[str, Part]] = {}
    for full, entry in entries.items():
        module, _, name = full.rpartition(".")
        plain, own = f"{module}.weight", name
        if method == "mxfp4":  # stacked experts: gate_up_proj_blocks, gate_up_proj_scales
            plain, _, own = full.rpartition("_")
        if own in arguments:
            part = Part(full=full, name=name, entry=entry)
            found.setdefault(plain, {})[arguments[own]] = part
    return found


def _weight(folder: Path, name: str, parts: dict[str, Part], quantization: Quantization) -> Weight:
    scheme = quantization.scheme(name.removesuffix(".weight"))
    if scheme is None:
        raise LoadError(
            f"{folder}: {name} is stored quantised and config.json says that it is not: config "
            "and weights are of different models"
        )
    if "weight" not in parts:
        names = "/".join(formats.CODES[scheme.code].names["weight"])
        raise LoadError(f"{folder}: {parts['scale'].full} has no {names} beside it: fetch it again")
    if scheme.ordered and "g_idx" not in parts:
        raise LoadError(
            f"{folder}: config.json says that the inputs of {name} are grouped by a g_idx "
            "(desc_act, actorder) and the checkpoint has none for it: fetch it again"
        )
    try:
        stored = _format(scheme, parts)
    except RecordError as error:
        raise LoadError(f"{folder}: {name} is in no format that is supported: {error}") from None
    return Weight(name=name, parts=parts, stored=stored, activation=scheme.activation)


def _format(scheme: Scheme, parts: Mapping[str, Part]) -> Format:
    scale = parts["scale"].entry
    one = math.prod(scale.shape) == 1
    granularity = scheme.granularity or ("tensor" if one else "channel")
    zeros = "/zeros" if scheme.zeros else ""
    # MXFP4's exponents are stored as plain bytes.
    dtype = "float8_e8m0fnu" if scheme.code == "mxfp4" else dtype_name(scale.dtype)
    return formats.parse(f"{scheme.code}/{granularity}/{dtype}{zeros}")
