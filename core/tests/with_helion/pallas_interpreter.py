"""Run as `python pallas_interpreter.py OP` with Helion's other backend, interpreted.

The same programs, compiled for another language and run by its interpreter: prints call → what is
wrong, or null. Only what Helion 1.5 can do there: int8, because it hands over no float8 tensor;
static shapes; and rows that fit a block of 8 or fill several of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

import helion
import torch

from polysilicon import ops
from polysilicon.kernels import quantized_rows
from polysilicon.ops.contract import Sample
from polysilicon.ops.verify import mismatch
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS: dict[str, Callable[..., Any]] = {
    "rms_norm_quant": quantized_rows.norm_and_quantize,
    "silu_and_mul_quant": quantized_rows.gate_and_quantize,
}
WIDTHS = {"rms_norm_quant": "hidden", "silu_and_mul_quant": "width"}
CASES = (
    ("bfloat16", 5, "int8/token/float32"),
    ("bfloat16", 16, "int8/group:64/float32"),
    ("float32", 1, "int8/group:64/float32"),
)


def main(op: str) -> None:
    """Prints the findings on a few calls of the op."""
    source = importlib.import_module(f"polysilicon.kernels.helion.{op}")
    program = helion.kernel(source.program, config=source.CONFIG, static_shapes=True)
    kernel, contract = functools.partial(CALLS[op], program), ops.get(op)
    assert contract.inputs is not None
    told = {}
    for dtype, rows, format in CASES:
        name = f"{rows} rows of {dtype} in {format}"
        asked = Problem(op=op, dtype=dtype, facts={WIDTHS[op]: 192, "format": format})
        target = getattr(torch, dtype)
        given = contract.inputs(asked, rows, target, torch.device("cpu"))
        sample = Sample(name=name, kwargs=given)
        told[name] = mismatch(contract, kernel, sample, target)
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
