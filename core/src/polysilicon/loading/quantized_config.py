"""`quantization_config` of a config.json: how the weights of each module are stored.

Read here and not by Transformers, whose quantisers need each method's own package. The tensors of
the checkpoint say which modules are quantised; this says what their numbers mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one module's weight is stored, as far as a config says it.

    Attributes:
        code: key of `formats.CODES`.
        granularity: as formats spell it; empty where the shape of the scales tells.
        zeros: whether zero points are stored.
        activation: format in which the input is multiplied; empty for the input as it is.
        ordered: whether groups are told by a g_idx, which must be there then.
    """

    code: str
    granularity: str
    zeros: bool = False
    activation: str = ""
    ordered: bool = False


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What a config says about its checkpoint's weights.

    Attributes:
        method: `quant_method`.
        settings: the object as it was written.
        scheme: module name → its scheme; None where the config leaves the module as it is.
    """

    method: str
    settings: Mapping[str, Any]
    scheme: Callable[[str], Scheme | None]


class _Fields:
    """One object of the config, whose fields are asked for by name and refused by name."""

    def __init__(self, path: Path, values: Any, where: str = "quantization_config") -> None:
        if not isinstance(values, dict):
            raise LoadError(f"{path}: {where} is {values!r}, expected a JSON object")
        self.path, self.values, self.where = path, values, where

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def among(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The value of a field that must be one of `allowed`."""
        value = self.values.get(name, default)
        if value not in allowed:
            raise self.error(name, f"one of {', '.join(map(repr, allowed))}")
        return value

    def absent(self, *names: str) -> None:
        """Refuses fields that would change what is computed."""
        for name in names:
            if self.values.get(name):
                raise self.error(name, "none: it is not supported")

    def inner(self, name: str) -> _Fields:
        return _Fields(self.path, self.values.get(name), f"{self.where}.{name}")

    def error(self, name: str, expected: str) -> LoadError:
        return LoadError(
            f"{self.path}: {self.where}.{name} is {self.values.get(name)!r}, expected {expected}; "
            "use another checkpoint of this model (unquantised, or GGUF)"
        )


def read_quantization(path: Path, settings: Any) -> Quantization:
    """What `quantization_config` of the file `path` says.

    Raises:
        LoadError: names the field whose value is not supported.
    """
    fields = _Fields(path, settings)
    method = fields.among("quant_method", tuple(_METHODS))
    return Quantization(method=method, settings=settings, scheme=_METHODS[method](fields))


def _gptq(fields: _Fields) -> Callable[[str], Scheme | None]:
    """AutoGPTQ's and GPTQModel's fields."""
    stored = "checkpoint_format" if "checkpoint_format" in fields.values else "format"
    packing = fields.among(stored, ("gptq", "gptq_v2"), "gptq")
    fields.among("pack_dtype", ("int32",), "int32")
    fields.absent("is_marlin_format", "use_marlin", "adapter")
    usual = _gptq_scheme(fields, packing)
    overrides = [
        (pattern, _gptq_override(fields, packing, pattern, value))
        for pattern, value in (fields.get("dynamic") or {}).items()
    ]

    def scheme(module: str) -> Scheme | None:
        for pattern, found in overrides:
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
                return found
        return usual

    return scheme


def _gptq_override(fields: _Fields, packing: str, pattern: str, changes: Any) -> Scheme | None:
    """What GPTQModel's `dynamic` says of the modules that match a pattern; `-:` leaves them."""
    if pattern.startswith("-:"):
        return None
    where = f"{fields.where}.dynamic[{pattern!r}]"
    inner = _Fields(fields.path, changes, where)
    inner.absent("adapter")
    return _gptq_scheme(_Fields(fields.path, {**fields.values, **inner.values}, where), packing)


def _gptq_scheme(fields: _Fields, packing: str) -> Scheme:
    bits = fields.among("bits", (4, 8))
    granularity = _groups(fields, "group_size")
    return Scheme(
        code=f"int{bits}.{packing}",
        granularity=granularity,
        zeros=True,
        ordered=bool(fields.get("desc_act")) and granularity != "channel",
    )


def _groups(fields: _Fields, name: str) -> str:
    size = fields.get(name)
    if size == -1:
        return "channel"
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise fields.error(name, "a number of inputs, or -1 for all of them")
    return f"group:{size}"


def _awq(fields: _Fields) -> Callable[[str], Scheme | None]:
    """AutoAWQ's fields."""
    fields.among("version", ("gemm", "GEMM"), "gemm")
    bits = "bits" if "bits" in fields.values else "w_bit"
    fields.among(bits, (4,))
    fields.among("zero_point", (True,), True)
    size = "group_size" if "group_size" in fields.values else "q_group_size"
    found = Scheme(code="int4.awq", granularity=_groups(fields, size), zeros=True)
    return lambda module: found


def _fp8(fields: _Fields) -> Callable[[str], Scheme | None]:
    """The fields of DeepSeek's and Qwen's checkpoints, and of per-tensor ones."""
    fields.among("fmt", ("e4m3",), "e4m3")
    fields.among("expert_dtype", ("fp8",), "fp8")
    fields.among("scale_fmt", (None, "float", "ue8m0"))
    fields.absent("modules_to_convert", "kv_cache_scheme")
    dynamic = fields.among("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    block = fields.get("weight_block_size")
    if block is None:
        given = "fp8_e4m3fn/token" if dynamic else "fp8_e4m3fn/tensor"
        found = Scheme(code="fp8_e4m3fn", granularity="", activation=given)
        return lambda module: found
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int for n in block):
        raise fields.error("weight_block_size", "two numbers, rows and columns, or null")
    if not dynamic:
        raise fields.error("activation_scheme", "'dynamic' where weight_block_size is given")
    found = Scheme(
        code="fp8_e4m3fn",
        granularity=f"block:{block[0]}x{block[1]}",
        activation=f"fp8_e4m3fn/group:{block[1]}",
    )
    return lambda module: found


def _mxfp4(fields: _Fields) -> Callable[[str], Scheme | None]:
    """GPT-OSS: the experts' weights alone are quantised, and no field says how."""
    found = Scheme(code="mxfp4", granularity="group:32")
    return lambda module: found


def _compressed_tensors(fields: _Fields) -> Callable[[str], Scheme | None]:
    """The fields of compressed-tensors (llm-compressor): groups of modules and their schemes."""
    fields.among("quantization_status", ("compressed",), "compressed")
    fields.absent("kv_cache_scheme", "transform_config")
    sparsity = fields.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise fields.error("sparsity_config", "none: it is not supported")
    groups = fields.inner("config_groups")
    if not groups.values:
        raise fields.error("config_groups", "at least one group of modules")
    targets: list[tuple[str, Scheme]] = []
    for name in groups.values:
        group = groups.inner(name)
        found = _compressed_scheme(fields, group)
        targets += [(target, found) for target in group.get("targets") or ()]
    ignored: list[str] = fields.get("ignore") or []

    def scheme(module: str) -> Scheme | None:
        if any(_names(pattern, module) for pattern in ignored):
            return None
        named = [found for target, found in targets if _names(target, module)]
        usual = [found for target, found in targets if target == "Linear"]
        return next(iter(named + usual), None)

    return scheme


def _names(target: str, module: str) -> bool:
    """Whether a target is a module's name, or a pattern (`re:`) of it."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


#: Layout of a group of compressed-tensors → types of its weights.
_LAYOUTS = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}


def _compressed_scheme(fields: _Fields, group: _Fields) -> Scheme:
    group.absent("output_activations")
    holder = group if group.get("format") else fields
    layout = holder.among("format", tuple(_LAYOUTS))
    weights = group.inner("weights")
    kind = weights.among("type", _LAYOUTS[layout], "int")
    weights.among("dynamic", (False,), False)
    symmetric = weights.among("symmetric", (True, False), True)
    if layout == "pack-quantized":
        code = f"int{weights.among('num_bits', (4, 8))}.compressed_tensors"
    else:
        weights.among("num_bits", (8,))
        weights.among("symmetric", (True,), True)
        code = "int8" if kind == "int" else "fp8_e4m3fn"
    orders = (None, False, "weight", "static", True, "group", "dynamic")
    ordered = weights.among("actorder", orders) in (True, "group", "dynamic")
    return Scheme(
        code=code,
        ordered=ordered,
        granularity=_strategy(weights, packed=layout == "pack-quantized"),
        zeros=not symmetric,
        activation=_input_scheme(group),
    )


def _strategy(weights: _Fields, *, packed: bool) -> str:
    usual = ("channel", "group")
    kind: str = weights.among("strategy", usual if packed else (*usual, "tensor", "block"))
    if kind == "group":
        return _groups(weights, "group_size")
    if kind == "block":
        block = weights.get("block_structure")
        if not isinstance(block, list) or len(block) != 2:
            raise weights.error("block_structure", "two numbers, rows and columns")
        return f"block:{block[0]}x{block[1]}"
    return kind


def _input_scheme(group: _Fields) -> str:
    """The format in which a group's inputs are multiplied; empty where they are left alone."""
    if group.get("input_activations") is None:
        return ""
    inputs = group.inner("input_activations")
    inputs.among("num_bits", (8,))
    inputs.among("symmetric", (True,), True)
    code = "int8" if inputs.among("type", ("int", "float"), "int") == "int" else "fp8_e4m3fn"
    if not inputs.among("dynamic", (True, False), False):
        return f"{code}/{inputs.among('strategy', ('tensor',), 'tensor')}"
    kind = inputs.among("strategy", ("token", "group"))
    return f"{code}/{_groups(inputs, 'group_size') if kind == 'group' else kind}"


_METHODS: dict[str, Callable[[_Fields], Callable[[str], Scheme | None]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
