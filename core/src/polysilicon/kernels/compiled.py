"""Records of core's kernels that a compiler makes on the device: Triton's, and Helion's sources.

Triton's are exported from Helion and committed (`python -m polysilicon.kernels.helion.export`), so
that serving needs no Helion. Helion itself serves where it is asked for by name.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from polysilicon.errors import RecordError
from polysilicon.formats import activation, block_of
from polysilicon.records import Kernel

if TYPE_CHECKING:
    from polysilicon.records import Device, Problem

_DTYPES = frozenset({"float32", "float16", "bfloat16"})
#: Numbers of a row, which lies in registers: 64 for each of 256 threads.
MOST_NUMBERS = 16384
#: Key numbers of a head, of which a program holds a column for each of its values.
MOST_SIZE = 256
#: Tokens of a call up to which they are walked over one by one: the sequences of a decode step.
MOST_STEPS = 256

#: Toolchain → its module and what brings it.
_TOOLCHAINS = {
    "triton": "pip install 'triton>=3.6,<3.10'",
    "helion": "pip install 'polysilicon[helion]'",
}


def kernels(device: Device) -> tuple[Kernel, ...]:
    """The compiled kernels, for every device: core says what a device is not for."""
    rows = {
        "rms_norm_quant": functools.partial(_rows, device, "hidden"),
        "silu_and_mul_quant": functools.partial(_rows, device, "width"),
    }
    found = []
    for form in ("triton", "helion"):
        found += [_kernel(form, op, functools.partial(claim, form)) for op, claim in rows.items()]
        walk = _kernel(form, "gated_delta_rule", functools.partial(_walk, form))
        shapes = "polysilicon.ops.gated_delta_rule:gated_delta_rule_fake"
        note = f"for decode steps, token by token; {walk.note}"
        found.append(replace(walk, fake=shapes, tokens=(1, MOST_STEPS), note=note))
    return tuple(found)


def _kernel(form: str, op: str, supports: functools.partial[str | None]) -> Kernel:
    """The record of one op in Triton, or of its source in Helion."""
    exported = form == "triton"
    return Kernel(
        op=op,
        name=f"{op}.{form}",
        target=f"polysilicon.kernels.{form}.{op}:{op}",
        device="*:triton",
        dtypes=_DTYPES,
        supports=supports,
        # Helion's launches cost more than those of what is exported from it.
        rank=10 if exported else -10,
        form="opaque",
        fake=f"polysilicon.kernels.triton.{op}:fake",
        offline=f"polysilicon.kernels.triton.{op}:offline" if exported else None,
        note=(
            "exported from Helion; compiled and interpreted, not run on a chip"
            if exported
            else "by name, for comparison: the same program as the one in Triton"
        ),
    )


def _missing(toolchain: str) -> str | None:
    if find_spec(toolchain) is None:
        return f"needs {toolchain}, which is not installed: {_TOOLCHAINS[toolchain]}"
    return None


def _rows(device: Device, width: str, toolchain: str, problem: Problem) -> str | None:
    """Why a kernel that quantises rows can't serve a problem; None where it can."""
    if reason := _missing(toolchain):
        return reason
    if problem.fact("weight", True) is False:
        return "takes a norm with a weight, and this has none"
    try:
        stored = activation(str(problem.fact("format")))
    except RecordError as error:
        return str(error)
    native = str(device.facts.get("native_formats", "")).split(",")
    if stored.dtype not in native:
        return f"{device.name} converts to no {stored.dtype} itself: it would be emulated"
    if stored.granularity == "tensor":
        return "finds its scales in the call, and tensor has a given one"
    numbers, size = int(problem.fact(width) or 0), block_of(stored)[1]
    if numbers > MOST_NUMBERS:
        return f"{width} is {numbers}: it holds rows of up to {MOST_NUMBERS}"
    if size and numbers % size:
        return f"{width} is {numbers}, which is not in whole groups of {size}"
    return None


def _walk(toolchain: str, problem: Problem) -> str | None:
    """Why a kernel that walks over tokens can't serve a problem; None where it can."""
    if reason := _missing(toolchain):
        return reason
    if problem.fact("by_channel", False):
        return "takes one decay a head, and here each key channel has its own"
    size = int(problem.fact("head_size") or 0)
    if size > MOST_SIZE:
        return f"head_size is {size}: it holds states of up to {MOST_SIZE}"
    return None
