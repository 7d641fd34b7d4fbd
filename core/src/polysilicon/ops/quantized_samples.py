"""Quantised weights for the samples of the ops that take them, and calls of a problem's shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from polysilicon import formats
from polysilicon.encoding import encode
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from torch import Tensor

    from polysilicon.records import Format, Problem

#: (name, format, [N, K], whether groups aren't runs of inputs): each code, packing, granularity
#: and group that checkpoints have, and sizes that fill no block.
WEIGHTS: tuple[tuple[str, str, tuple[int, ...], bool], ...] = (
    ("fp8 tensor", "fp8_e4m3fn/tensor", (33, 48), False),
    ("fp8 channel", "fp8_e4m3fn/channel", (33, 47), False),
    ("fp8 without rows", "fp8_e4m3fn/channel", (0, 16), False),
    ("fp8 channel bfloat16 scales", "fp8_e4m3fn/channel/bfloat16", (7, 40), False),
    ("fp8 block", "fp8_e4m3fn/block:128x128", (256, 128), False),
    ("fp8 block not full", "fp8_e4m3fn/block:128x128", (130, 200), False),
    ("fp8 block powers of two", "fp8_e4m3fn/block:128x128/float8_e8m0fnu", (130, 200), False),
    ("fp8 e4m3fnuz", "fp8_e4m3fnuz/channel", (24, 32), False),
    ("int8 tensor", "int8/tensor", (16, 32), False),
    ("int8 channel", "int8/channel", (33, 48), False),
    ("int8 channel bfloat16 scales", "int8/channel/bfloat16", (33, 48), False),
    ("int8 group", "int8/group:32/float16", (17, 64), False),
    ("gptq 32", "int4.gptq/group:32", (40, 96), False),
    ("gptq 64", "int4.gptq/group:64", (8, 128), False),
    ("gptq 128", "int4.gptq/group:128", (24, 256), False),
    ("gptq one group", "int4.gptq/channel", (16, 72), False),
    ("gptq act-order", "int4.gptq/group:32", (24, 128), True),
    ("gptq v2", "int4.gptq_v2/group:32/bfloat16", (16, 64), False),
    ("gptq 8 bits", "int8.gptq/group:32", (12, 64), False),
    ("awq 128", "int4.awq/group:128", (40, 256), False),
    ("awq 32", "int4.awq/group:32/float32", (8, 33 * 32), False),
    ("compressed-tensors 32", "int4.compressed_tensors/group:32/bfloat16", (33, 96), False),
    ("compressed-tensors channel", "int4.compressed_tensors/channel", (5, 43), False),
    ("compressed-tensors zeros", "int4.compressed_tensors/group:32/float16/zeros", (19, 64), False),
    ("compressed-tensors act-order", "int4.compressed_tensors/group:32", (19, 96), True),
    ("compressed-tensors 8 bits", "int8.compressed_tensors/channel", (9, 38), False),
    ("8 bits bfloat16 scales", "int8.compressed_tensors/channel/bfloat16", (9, 64), False),
    ("mxfp4", "mxfp4/group:32", (40, 96), False),
)


def weight_sample(
    format: str, shape: tuple[int, ...], device: torch.device, *, act_order: bool = False
) -> dict[str, Any]:
    """weight, scale, zeros, g_idx and format of a seeded weight [..., N, K] of scale K^-1/2."""
    stored, columns = formats.parse(format), shape[-1]
    source = Source(torch.float32, torch.device("cpu"), seed=columns)
    dense = source.normal(*shape, magnitude=columns**-0.5)
    g_idx = None
    if act_order:
        size = formats.block_of(stored)[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        g_idx = (order // size).int()
    tensors = encode(stored, dense, g_idx)
    return {
        name: _on(tensors.get(name), device) for name in ("weight", "scale", "zeros", "g_idx")
    } | {"format": str(stored)}


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def problem_weight(
    problem: Problem, device: torch.device, experts: tuple[int, ...] = ()
) -> dict[str, Any]:
    """weight, scale, zeros, g_idx and format of a weight with the problem's shape.

    Drawn as codes, which costs no more than the memory: the weight of a model's own layer.
    """
    stored = formats.parse(str(problem.fact("format") or formats.FP8_CHANNEL))
    rows, columns = int(problem.fact("out") or 1024), int(problem.fact("in") or 1024)
    shapes = {arg: options[0] for arg, options in formats.shapes(stored, rows, columns).items()}
    source = Source(torch.float32, device)
    g_idx = None
    if problem.fact("act_order", False):
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
        g_idx = (order // (formats.block_of(stored)[1] or columns)).int().to(device)
    return {
        "weight": _codes(source, stored, (*experts, *shapes["weight"])),
        "scale": _scale(source, stored, (*experts, *shapes["scale"]), columns),
        "zeros": _codes(source, stored, (*experts, *shapes["zeros"]))
        if stored.zero_points
        else None,
        "g_idx": g_idx,
        "format": str(stored),
    }


#: Standard deviation of the numbers of codes that are drawn evenly, zero points among them.
_SPREAD = {"int4": 6.5, "int8": 74.0, "mxfp4": 3.0}


def _codes(source: Source, stored: Format, shape: tuple[int, ...]) -> Tensor:
    dtype = getattr(torch, stored.dtype)
    if dtype.is_floating_point:
        return source.normal(*shape).to(dtype)
    limits = torch.iinfo(dtype)
    return (source.integers(limits.max - limits.min + 1, *shape) + limits.min).to(dtype)


def _scale(source: Source, stored: Format, shape: tuple[int, ...], columns: int) -> Tensor:
    """Scales around what makes a product of normal numbers one of size one."""
    size = columns**-0.5 / _SPREAD.get(stored.logical, 1.0)
    if stored.logical == "mxfp4":
        return (source.integers(2, *shape) + 126 + round(math.log2(size))).to(torch.uint8)
    factor = 1 + 0.1 * source.normal(*shape).clamp(-3, 3)
    scale: Tensor = (size * factor).to(getattr(torch, str(stored.scale_dtype)))
    return scale
