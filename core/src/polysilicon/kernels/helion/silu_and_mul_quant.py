# mypy: disable-error-code="untyped-decorator,no-any-return"
"""silu_and_mul_quant in Helion: a row of gates is computed and quantised in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import helion
import helion.language as hl
import torch
from torch import Tensor

from polysilicon.kernels.quantized_rows import gate_and_quantize

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONFIG = helion.Config(block_sizes=[1], num_warps=8, num_stages=1)


def program(
    x: Tensor,  # [rows, groups, size], what the gate is made of
    up: Tensor,  # [rows, groups, size]
    codes: Tensor,  # [rows, groups, size], written
    scales: Tensor,  # float32 [rows, groups], written
    largest: float,  # number that the codes hold
) -> None:
    """The definition of quantize, of silu(x) · up rounded to the dtype of `x`."""
    rows = x.size(0)
    for row in hl.tile(rows):
        gate = x[row, :, :].to(torch.float32)
        gated = gate * torch.sigmoid(gate) * up[row, :, :].to(torch.float32)
        rounded = gated.to(x.dtype).to(torch.float32)
        found = torch.amax(torch.abs(rounded), -1) / largest
        scale = torch.where(found == 0, 1.0, found)
        quotient = torch.clamp(rounded / scale[:, :, None], -largest, largest)
        if codes.dtype == torch.int8:
            quotient = torch.round(quotient)
        codes[row, :, :] = quotient.to(codes.dtype)
        scales[row, :] = scale


compiled: Callable[..., None] = helion.kernel(
    program, config=CONFIG, static_shapes=False, index_dtype=torch.int64
)


def silu_and_mul_quant(
    x: Tensor,  # [..., 2 · width]
    format: str,
) -> tuple[Tensor, Tensor]:
    """The op's contract (polysilicon/ops/silu_and_mul_quant.py)."""
    return gate_and_quantize(compiled, x, format)


#: Type in the programs below → what stands for it, so that one program serves all dtypes.
TYPES = {"tl.bfloat16": "x.dtype.element_ty", "tl.float8e4nv": "codes.dtype.element_ty"}


def examples() -> dict[str, tuple[Any, ...]]:
    """Exported program → arguments of a call that it is made from.

    No size is one, and no tensor another one: Helion would make one argument of two.
    """
    x = torch.zeros(5, 4, 128, dtype=torch.bfloat16)
    return {
        f"to_{name}": (x, x.clone(), x.to(dtype), x[:, :, 0].float(), 448.0)
        for name, dtype in (("float8", torch.float8_e4m3fn), ("int8", torch.int8))
    }
