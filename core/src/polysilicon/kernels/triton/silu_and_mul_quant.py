"""silu_and_mul_quant in Triton; its programs come from `kernels/helion/silu_and_mul_quant.py`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from polysilicon.calling import load_target
from polysilicon.kernels.quantized_rows import formats_of, gate_and_quantize, results
from polysilicon.kernels.triton.exported import silu_and_mul_quant as exported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from polysilicon.records import Compiled, Device


def silu_and_mul_quant(
    x: Tensor,  # [..., 2 · width]
    format: str,
) -> tuple[Tensor, Tensor]:
    """The op's contract (polysilicon/ops/silu_and_mul_quant.py)."""
    program = exported.to_int8 if format.startswith("int8") else exported.to_float8
    return gate_and_quantize(program, x, format)


def fake(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    return results(x, x.shape[-1] // 2, format)


def offline(device: Device) -> Iterator[Compiled]:
    """Widths of small to large models, in the formats that the chip converts to itself."""
    judged = load_target(str(device.facts["triton"]))
    for format in formats_of(device):
        for width in (1024, 4096, 14336):
            x = torch.empty(512, 2 * width, dtype=torch.bfloat16, device="meta")
            call = functools.partial(silu_and_mul_quant, x, format)
            variant = f"width {width}, {format}"
            yield from judged(device, "silu_and_mul_quant.triton", variant, call)
