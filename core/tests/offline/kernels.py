"""Throwaway Triton kernels with a host wrapper, for the tests of compiling and interpreting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def matmul(
    a, b, c, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        down, across = start + tl.arange(0, BK)[:, None], start + tl.arange(0, BK)[None, :]
        x = tl.load(a + rows * sam + across * sak, mask=(rows < M) & (across < K), other=0.0)
        y = tl.load(b + down * sbk + columns * sbn, mask=(down < K) & (columns < N), other=0.0)
        total = tl.dot(x, y, total)
    value = total.to(c.dtype.element_ty)
    tl.store(c + rows * N + columns, value, mask=(rows < M) & (columns < N))


tuned_hooks: list[int] = []
tuned = triton.autotune(
    [
        triton.Config(
            {"BM": 64, "BN": wide},
            num_warps=4,
            pre_hook=lambda arguments: tuned_hooks.append(arguments["BN"]),
        )
        for wide in (32, 64, 128)
    ],
    key=["M", "N"],
)(matmul)
# The other way round than `tuned_over_heuristics`: what chooses BK wraps what is tuned.
heuristics_over_tuned = triton.heuristics({"BK": lambda arguments: 32})(tuned)
tuned_over_heuristics = triton.autotune(
    [triton.Config({"BM": 64, "BN": 64}, num_warps=warps) for warps in (4, 8)], key=["M"]
)(triton.heuristics({"BK": lambda arguments: 32})(matmul))


def multiply(a: torch.Tensor, b: torch.Tensor, kernel=matmul, **config: int) -> torch.Tensor:
    """a @ b, whatever the strides of both."""
    (rows, inner), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns)

    def grid(config):
        return triton.cdiv(rows, config["BM"]), triton.cdiv(columns, config["BN"])

    strides = (*a.stride(), *b.stride())
    kernel[grid](a, b, out, rows, columns, inner, *strides, **config)
    return out


@triton.jit
def copy(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N), mask=at < N)


@triton.jit
def ptx_only(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    doubled = tl.inline_asm_elementwise(
        "add.f32 $0, $1, $1;", "=f,f", [tl.load(x + at)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + at, doubled)


@triton.jit
def refused(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64, "a block is too small")
    tl.store(x + tl.arange(0, BLOCK), 1.0)


@triton.jit
def add(x, y, out, N: tl.constexpr, WIDEN: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(out + at, a + b)


@triton.jit
def total(x, out, N: tl.constexpr, WIDEN: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    if WIDEN:
        value = value.to(tl.float32)
    tl.store(out, tl.sum(value, axis=0))


@triton.jit
def negate(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, -tl.load(x + at))


@triton.jit
def cast(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at))
