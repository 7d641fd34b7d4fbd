"""Run as `python exported_kernels.py KERNEL MOST DTYPE…`: prints what is wrong as one JSON object.

In a process of its own, where Triton interprets: every check of the conformance suite on every
sample that the kernel claims of at most so many tokens.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from polysilicon.testing import triton_interpreter

triton_interpreter.activate()

from polysilicon.kernels.compiled import kernels  # noqa: E402 some of it imports Triton
from polysilicon.records import Device  # noqa: E402
from polysilicon.testing.op_checks import OpCase, check_kernel  # noqa: E402

CHIP = Device(
    name="acme",
    kind="acme",
    facts={"triton": "acme:compile", "native_formats": "int8,float8_e4m3fn,float8_e4m3fnuz"},
)


def main(name: str, most: str, *dtypes: str) -> None:
    """Prints dtype → [number of checks that were made, what they found]."""
    (kernel,) = (kernel for kernel in kernels(CHIP) if kernel.name == name)
    told = {}
    few = replace(kernel, tokens=(1, int(most)))
    for dtype in dtypes:
        found = check_kernel(OpCase(kernel=few, dtype=dtype), "cpu")
        bad = [f"{'/'.join(f.details)} {f.check}: {f.text}" for f in found if f.text]
        told[dtype] = (sum(not finding.skipped for finding in found), bad)
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
