"""linear on a weight in the layout `amd.shuffle16`, in Triton: x · weightᵀ + bias.

A program has a tile of tokens × outputs. It reads the weight as it lies, 16 contiguous bytes a
lane, and puts it in order in registers. With few tokens there are fewer tiles than compute units:
then the sum over the inputs is split, and a second kernel adds the parts, in a fixed order.

Compiled offline for each architecture and checked in Triton's interpreter; never run on hardware.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from polysilicon_amd.chips import ARCHES, CHIPS
from polysilicon_amd.compiled import compiled_records
from polysilicon_amd.kernels.linear_tiles import MOST_SIZE, PROGRAMS_PER_UNIT, tile_for
from polysilicon_amd.layout import ROWS, STEP, lane_elements, pack_shuffle16

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from polysilicon.api import Compiled, Device
    from polysilicon_amd.kernels.linear_tiles import Tile

#: (tokens, out, in, dtype) that are compiled offline: each tile, the usual sizes, and odd ones.
_VARIANTS = (
    *((tokens, 4096, 4096, torch.bfloat16) for tokens in (1, 64, 4096)),
    *((tokens, 4096, 4096, torch.float16) for tokens in (1, 64, 4096)),
    (7, 257, 4099, torch.bfloat16),
)

#: Whose tiles the interpreter uses, where there is no chip to ask.
_INTERPRETED = "gfx942"
#: A split has at least this many steps, so that reading the weight outweighs adding the parts.
_STEPS_PER_SPLIT = 4
_MOST_SPLITS = 16
#: Elements of one program that adds parts.
_ADDED = 1024


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out/16, in/x, 16, x], as amd.shuffle16 packs [out, in]
    bias: Tensor | None,  # [out]
    weight_shape: Sequence[int],  # (out, in)
) -> Tensor:
    """x · weightᵀ + bias, summed in float32."""
    out, width = weight_shape
    rows = x.reshape(math.prod(x.shape[:-1]), width)
    if rows.stride(1) != 1 or rows.stride(0) > MOST_SIZE:
        rows = rows.contiguous()
    y = x.new_empty(rows.shape[0], out)
    if y.numel():
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            launch(rows, weight, bias, y, _arch(x))
    return y.view(*x.shape[:-1], out)


def linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_shape: Sequence[int]
) -> Tensor:
    """The result's shape."""
    return x.new_empty(*x.shape[:-1], weight_shape[0])


def _arch(x: Tensor) -> str:
    if x.is_cuda:
        return _arch_of(x.device.index)
    if triton.knobs.runtime.interpret:
        return _INTERPRETED
    return _active_arch()


@functools.cache
def _arch_of(index: int) -> str:
    with torch.cuda.device(index):
        return _active_arch()


def _active_arch() -> str:
    return str(triton.runtime.driver.active.get_current_target().arch)


def launch(
    rows: Tensor,  # [tokens, in], in contiguous
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,  # [tokens, out], not empty
    arch: str,
) -> None:
    """Writes rows · weightᵀ + bias to y, with the tiles of an architecture."""
    (tokens, width), out = rows.shape, y.shape[1]
    tile, chip = tile_for(arch, tokens), ARCHES[arch]
    lane = lane_elements(weight.element_size())
    m_tiles, n_tiles = triton.cdiv(tokens, tile.m), triton.cdiv(out, tile.n)
    steps = triton.cdiv(width, tile.k)
    splits = split_count(m_tiles * n_tiles, steps, CHIPS[chip.typical].compute_units)
    parts = y if splits == 1 else y.new_empty(splits, tokens, out, dtype=torch.float32)
    _shuffled[(m_tiles * n_tiles, splits)](
        rows,
        weight,
        bias,
        parts,
        tokens,
        out,
        width,
        rows.stride(0),
        triton.cdiv(width, STEP) * STEP,
        triton.cdiv(steps, splits) * tile.k,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        PIECE=chip.wave_size // ROWS * lane,
        ROWS=ROWS,
        LANE=lane,
        BIAS=bias is not None and splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_amd_options(tile),
    )
    if splits > 1:
        _added[(tokens, triton.cdiv(out, _ADDED))](
            parts, bias, y, splits, y.numel(), out, BIAS=bias is not None, BLOCK=_ADDED
        )


def split_count(tiles: int, steps: int, compute_units: int) -> int:
    """Parts of the sum over the inputs, so that all compute units have work."""
    wanted = PROGRAMS_PER_UNIT * compute_units // tiles
    return max(1, min(wanted, steps // _STEPS_PER_SPLIT, _MOST_SPLITS))


def _amd_options(tile: Tile) -> dict[str, int]:
    """The interpreter takes options of every backend for arguments of the kernel."""
    if triton.knobs.runtime.interpret:
        return {}
    return {
        "waves_per_eu": tile.waves_per_eu,
        "matrix_instr_nonkdim": tile.instruction,
        "kpack": tile.kpack,
    }


@triton.jit  # type: ignore[untyped-decorator]
def _shuffled(  # type: ignore[no-untyped-def]
    x,  # [tokens, in]
    weight,  # [out/16, in_padded/LANE, 16, LANE]
    bias,  # [out]
    y,  # [tokens, out], or float32 [splits, tokens, out]
    tokens,
    outputs,
    inputs,
    x_stride,
    inputs_padded,
    split_inputs,  # inputs of one split, a multiple of K
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    BIAS: tl.constexpr,
):
    # Tiles of the same outputs are neighbours: they read the same weight.
    m_tiles = tl.cdiv(tokens, M)
    m_begin = tl.program_id(0) % m_tiles * M
    n_begin = tl.program_id(0) // m_tiles * N
    split = tl.program_id(1)

    m = tl.arange(0, M)
    k = tl.arange(0, K)
    # The weight's elements as they lie: pieces of the inputs × groups of 16 outputs × what a wave
    # loads at once. In this order each wave gets groups of its own, lane by lane as a matrix
    # instruction wants them: where waves share no outputs, nothing is exchanged.
    piece = tl.arange(0, K // PIECE)[:, None, None]
    group = tl.arange(0, N // ROWS)[None, :, None]
    lie = tl.arange(0, PIECE * ROWS)[None, None, :]

    # 64-bit up to the tile, 32-bit inside.
    x += m_begin.to(tl.int64) * x_stride
    weight += n_begin.to(tl.int64) * inputs_padded
    x_at = m[:, None] * x_stride + k[None, :]
    weight_at = piece * (PIECE * ROWS) + group * (ROWS * inputs_padded) + lie
    m_here = (m_begin + m < tokens)[:, None]
    group_here = n_begin + group * ROWS < outputs

    total = tl.zeros((M, N), tl.float32)
    begin = split * split_inputs
    for k_begin in range(begin, min(begin + split_inputs, inputs), K):
        k_here = (k_begin + k < inputs)[None, :]
        piece_here = k_begin + piece * PIECE < inputs_padded
        a = tl.load(x + k_begin + x_at, mask=m_here & k_here, other=0.0)
        b = tl.load(weight + k_begin * ROWS + weight_at, mask=group_here & piece_here, other=0.0)
        b = b.reshape(K // PIECE, N // ROWS, PIECE // LANE, ROWS, LANE)
        b = b.permute(0, 2, 4, 1, 3).reshape(K, N)
        total = tl.dot(a, b, total)

    n = tl.arange(0, N)
    n_here = n_begin + n < outputs
    if BIAS:
        total += tl.load(bias + n_begin + n, mask=n_here, other=0.0).to(tl.float32)[None, :]
    y += (split.to(tl.int64) * tokens + m_begin) * outputs + n_begin
    # outputs may be a vocabulary and tokens many thousands: the rows of a tile fit 32 bits.
    y_at = m[:, None] * outputs + n[None, :]
    tl.store(y + y_at, total.to(y.dtype.element_ty), mask=m_here & n_here[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    parts,  # float32 [splits, tokens, out]
    bias,  # [out]
    y,  # [tokens, out]
    splits,
    elements,  # tokens · out
    outputs,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * outputs
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(parts + row + at, mask=here, other=0.0)
        parts += elements
    if BIAS:
        total += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row + at, total.to(y.dtype.element_ty), mask=here)


def offline(device: Device) -> Iterator[Compiled]:
    """The kernel in each of its tiles, compiled for a device that need not be here."""
    for tokens, out, width, dtype in _VARIANTS:
        x = torch.empty(tokens, width, dtype=dtype, device="meta")
        weight = pack_shuffle16(torch.empty(out, width, dtype=dtype, device="meta"))
        bias = torch.empty(out, dtype=dtype, device="meta")
        name = f"{tokens} × {width} → {out} {str(dtype).removeprefix('torch.')}"
        yield from compiled_records(
            "linear.amd_shuffled",
            name,
            functools.partial(linear, x, weight, bias, (out, width)),
            ARCHES[device.arch],
            matrix=lambda kernel: kernel == "_shuffled",
        )
