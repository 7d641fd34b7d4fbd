"""The kernel that tells whether Triton's interpreter multiplies bfloat16 as it should."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from polysilicon.errors import ToolchainError

SIZE = 16


@triton.jit  # type: ignore[untyped-decorator]
def _dot(a: Any, b: Any, out: Any, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def check() -> None:
    """Passes if 1 × 2.5 + 1 × 2.0 is 4.5.

    Raises:
        ToolchainError: it is not, so that no bfloat16 test of this process would mean anything.
    """
    a = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)
    a[:, 0], a[:, 1] = 2.5, 2.0
    out = torch.empty(SIZE, SIZE)
    _dot[(1,)](a, torch.ones_like(a), out, SIZE)
    if not torch.all(out == 4.5):
        raise ToolchainError(
            f"the interpreter of Triton {triton.__version__} says that 2.5 + 2.0 in bfloat16 is "
            f"{out[0, 0].item()}, expected 4.5: its tl.dot is not mended, see "
            "polysilicon.testing.triton_interpreter"
        )
