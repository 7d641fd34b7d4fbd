"""The kernels that tell whether Triton's interpreter treats bfloat16 and float8 as it should."""

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


@triton.jit  # type: ignore[untyped-decorator]
def _cast(x: Any, out: Any, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def check() -> None:
    """Passes if 1 × 2.5 + 1 × 2.0 is 4.5, and casts to float8 are torch's.

    Raises:
        ToolchainError: they are not, so that no test of that dtype in this process would mean
            anything.
    """
    _check_dot()
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2):
        _check_cast(dtype)


def _check_cast(dtype: torch.dtype) -> None:
    # Denormals, ties, and what rounds up into the next binade.
    x = torch.linspace(1, 2.125, 64).outer(2.0 ** torch.arange(-12, 4)).flatten()
    out = torch.empty_like(x, dtype=dtype)
    _cast[(1,)](x, out, x.numel())
    wrong = (out.float() != x.to(dtype).float()).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ToolchainError(
            f"the interpreter of Triton {triton.__version__} casts {x[first].item()} to "
            f"{out[first].item()} in {dtype}, expected {x[first].to(dtype).item()}: its casts are "
            "not mended, see polysilicon.testing.triton_interpreter"
        )


def _check_dot() -> None:
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
