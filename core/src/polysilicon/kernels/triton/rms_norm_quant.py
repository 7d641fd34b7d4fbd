"""rms_norm_quant in Triton; its programs come from `kernels/helion/rms_norm_quant.py`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from polysilicon.calling import load_target
from polysilicon.kernels.quantized_rows import formats_of, norm_and_quantize, results
from polysilicon.kernels.triton.exported import rms_norm_quant as exported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from polysilicon.records import Compiled, Device


def rms_norm_quant(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float,
    format: str,
) -> tuple[Tensor, Tensor]:
    """The op's contract (polysilicon/ops/rms_norm_quant.py)."""
    program = exported.to_int8 if format.startswith("int8") else exported.to_float8
    return norm_and_quantize(program, x, weight, eps, offset, format)


def fake(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, format: str
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    return results(x, x.shape[-1], format)


def offline(device: Device) -> Iterator[Compiled]:
    """Hidden sizes of small to large models, in the formats that the chip converts to itself."""
    judged = load_target(str(device.facts["triton"]))
    for format in formats_of(device):
        for hidden in (1024, 4096, 16384):
            x = torch.empty(512, hidden, dtype=torch.bfloat16, device="meta")
            call = functools.partial(rms_norm_quant, x, x[0], 1e-6, 0.0, format)
            variant = f"hidden {hidden}, {format}"
            yield from judged(device, "rms_norm_quant.triton", variant, call)
