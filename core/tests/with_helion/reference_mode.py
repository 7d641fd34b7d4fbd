"""Run as `python reference_mode.py KERNEL DTYPE` with HELION_INTERPRET=1: prints what is wrong.

Helion then runs a program's Python on tensors, one tile after the other, and needs no compiler.
"""

from __future__ import annotations

import json
import sys

from polysilicon.kernels.compiled import kernels
from polysilicon.records import Device
from polysilicon.testing.op_checks import OpCase, check_kernel

CHIP = Device(
    name="acme",
    kind="acme",
    facts={"triton": "acme:compile", "native_formats": "int8,float8_e4m3fn,float8_e4m3fnuz"},
)


def main(name: str, dtype: str) -> None:
    """Prints the number of checks that were made, and what they found."""
    (kernel,) = (kernel for kernel in kernels(CHIP) if kernel.name == name)
    found = check_kernel(OpCase(kernel=kernel, dtype=dtype), "cpu")
    bad = [f"{'/'.join(f.details)} {f.check}: {f.text}" for f in found if f.text]
    print(json.dumps((sum(not finding.skipped for finding in found), bad)))


if __name__ == "__main__":
    main(*sys.argv[1:])
