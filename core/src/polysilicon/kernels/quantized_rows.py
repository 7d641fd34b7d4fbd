"""How the programs that quantise rows are called, whichever language they are written in.

A program sees every row as [groups, size], the numbers of a group sharing a scale; with a scale by
token a row is one group. It writes to tensors that are made here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polysilicon import formats
from polysilicon.codes import named
from polysilicon.ops.quantize import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from polysilicon.records import Device

    Program = Callable[..., object]


def results(x: Tensor, width: int, format: str) -> tuple[Tensor, Tensor]:
    """Codes [..., width] and float32 scales [..., groups] for rows [..., any]; not written to."""
    stored = named(format)
    size = formats.block_of(stored)[1] or width
    codes = x.new_empty(*x.shape[:-1], width, dtype=getattr(torch, stored.dtype))
    return codes, x.new_empty(*x.shape[:-1], width // size, dtype=torch.float32)


def norm_and_quantize(
    program: Program, x: Tensor, weight: Tensor | None, eps: float, offset: float, format: str
) -> tuple[Tensor, Tensor]:
    """rms_norm_quant by a program of it.

    Raises:
        ValueError: there is no weight.
    """
    if weight is None:
        raise ValueError("this kernel of rms_norm_quant takes a norm with a weight, and got none")
    codes, scale = results(x, x.shape[-1], format)
    if x.numel():
        shape = _shape(scale, x.shape[-1])
        rows = (x.reshape(shape), weight.reshape(shape[1:]), codes.view(shape))
        program(*rows, scale.view(shape[:2]), eps, offset, _largest(format))
    return codes, scale


def gate_and_quantize(program: Program, x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """silu_and_mul_quant by a program of it."""
    gate, up = x.chunk(2, -1)
    codes, scale = results(x, gate.shape[-1], format)
    if x.numel():
        shape = _shape(scale, gate.shape[-1])
        rows = (gate.reshape(shape), up.reshape(shape), codes.view(shape))
        program(*rows, scale.view(shape[:2]), _largest(format))
    return codes, scale


def _shape(scale: Tensor, width: int) -> tuple[int, int, int]:
    groups = scale.shape[-1]
    return scale.numel() // groups, groups, width // groups


def _largest(format: str) -> float:
    return LIMITS[named(format).logical][1]


def formats_of(device: Device) -> list[str]:
    """The formats in which a chip's programs are compiled offline: those that it converts to."""
    native = str(device.facts["native_formats"]).split(",")
    stored = (named(text) for text in ("fp8_e4m3fn/token", "fp8_e4m3fnuz/token", "int8/token"))
    by_token = [str(one) for one in stored if one.dtype in native]
    return [*by_token, by_token[0].replace("token", "group:128")]
