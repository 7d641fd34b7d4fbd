"""A program: compiles a product of two fp8 tiles for each architecture and prints what it became.

Run as a process of its own, because a process compiles with Triton or interprets, never both.
Prints one JSON object: architecture → dtype → names of the matrix instructions.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from polysilicon.api import compile_triton
from polysilicon_amd.chips import ARCHES
from polysilicon_amd.compiled import matrix_instructions

FORMATS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
#: The smallest tile that fills a matrix instruction: emulation takes long to compile.
_SIZE = 16
_INPUTS = 128


@triton.jit  # type: ignore[untyped-decorator]
def product(a, b, c, SIZE: tl.constexpr, INPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    m, k = tl.arange(0, SIZE), tl.arange(0, INPUTS)
    left = tl.load(a + m[:, None] * INPUTS + k[None, :])
    right = tl.load(b + m[None, :] * INPUTS + k[:, None])
    tl.store(c + m[:, None] * SIZE + m[None, :], tl.dot(left, right))


def instructions(arch: str, dtype: str) -> list[str]:
    """The matrix instructions of a product in a dtype."""
    a = torch.empty(_SIZE, _INPUTS, dtype=getattr(torch, dtype), device="meta")
    c = torch.empty(_SIZE, _SIZE, device="meta")

    def launch() -> None:
        product[(1,)](a, a, c, SIZE=_SIZE, INPUTS=_INPUTS, num_warps=1)

    (made,) = compile_triton(launch, backend="hip", arch=arch, warp_size=ARCHES[arch].wave_size)
    assert not made.error, made.error
    return sorted(matrix_instructions(made))


print(json.dumps({a: {dtype: instructions(a, dtype) for dtype in FORMATS} for a in sys.argv[1:]}))
