"""Run as `python interpreted.py`: prints one JSON object of what interpreted kernels gave."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.ops.verify import same_bits
from polysilicon.testing import triton_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    """Activates the interpreter, twice, and uses it."""
    triton_interpreter.activate()
    triton_interpreter.activate()
    import kernels

    torch.manual_seed(0)
    x, y = torch.randn(2, 64).to(BF16)
    out = torch.empty_like(x)
    kernels.add[(1,)](x, y, out, N=64, WIDEN=True)
    summed = torch.empty(1)
    kernels.total[(1,)](x, summed, N=64, WIDEN=True)
    a, b = torch.randn(40, 96).to(BF16), torch.randn(96, 24).to(BF16)
    product = kernels.multiply(a, b, BM=16, BN=16, BK=32)
    exact = a.double() @ b.double()
    print(
        json.dumps(
            {
                "add": torch.equal(out, x + y),
                "sum": (summed - x.double().sum()).abs().item(),
                "dot": ((product.double() - exact).abs() / exact.abs().clamp(min=1)).max().item(),
                "casts": {f"{s} to {d}": _casts(kernels.cast, s, d) for s, d in _CASTS},
                "arithmetic": _raised(lambda: kernels.add[(1,)](x, y, out, N=64, WIDEN=False)),
                "reduction": _raised(lambda: kernels.total[(1,)](x, summed, N=64, WIDEN=False)),
                "negation": _raised(lambda: kernels.negate[(1,)](x, out, N=64)),
            }
        )
    )


_CASTS = (
    (torch.float32, BF16),
    (torch.float16, BF16),
    (torch.int32, BF16),
    (BF16, torch.float32),
    (BF16, torch.float16),
    (BF16, torch.int32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e4m3fnuz),
    (torch.float16, torch.float8_e5m2),
    (BF16, torch.float8_e4m3fn),
)


def _values(dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes from a denormal to an overflow, ties, and what is no number."""
    if not dtype.is_floating_point:
        return torch.arange(-512, 512, dtype=dtype)
    special = [0.0, -0.0, 3.3961e38, 1e-45, 1.00390625, 1.01171875, float("inf"), -float("inf")]
    spread = torch.randn(248) * torch.logspace(-42, 38, 248)
    # The last one, all bits set, is a NaN that rounding would carry into -0.
    nan = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)
    return torch.cat([torch.tensor(special), spread, nan]).to(dtype)


def _casts(kernel: Any, source: torch.dtype, target: torch.dtype) -> bool:
    values = _values(source)
    if not target.is_floating_point:
        values = (torch.randn(256) * 50).to(source)
    size = 1 << (len(values) - 1).bit_length()
    padded = torch.cat([values, values.new_zeros(size - len(values))])
    out = torch.empty(size, dtype=target)
    kernel[(1,)](padded, out, N=size)
    return same_bits(out, padded.to(target))


if __name__ == "__main__":
    main()
