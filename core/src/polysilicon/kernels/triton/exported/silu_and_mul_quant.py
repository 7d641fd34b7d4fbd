# mypy: ignore-errors
# ruff: noqa
"""Exported from kernels/helion/silu_and_mul_quant.py by Helion 1.5.1; do not edit.

`python -m polysilicon.kernels.helion.export` writes it anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from polysilicon.kernels.triton.exported import language

_BLOCK_SIZE_0_to_float8 = tl.constexpr(1)

@triton.jit
def _to_float8(x, up, codes, scales, up_size_2, x_size_1, codes_stride_0, codes_stride_1, codes_stride_2, scales_stride_0, scales_stride_1, up_stride_0, up_stride_1, up_stride_2, x_stride_0, x_stride_1, x_stride_2, largest, _RDIM_SIZE_1: tl.constexpr, _RDIM_SIZE_2: tl.constexpr):
    pid_0 = tl.program_id(0).to(tl.int64)
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int64)
    indices_1 = tl.arange(0, _RDIM_SIZE_1).to(tl.int64)
    mask_1 = indices_1 < x_size_1
    indices_2 = tl.arange(0, _RDIM_SIZE_2).to(tl.int64)
    mask_2 = indices_2 < up_size_2
    load = tl.load(x + (indices_0[:, None, None] * x_stride_0 + (0 + indices_1)[None, :, None] * x_stride_1 + (0 + indices_2)[None, None, :] * x_stride_2), mask_1[None, :, None] & mask_2[None, None, :], other=0)
    v_0 = tl.cast(load, tl.float32)
    v_1 = tl.cast(v_0, tl.float32)
    v_2 = tl.sigmoid(v_1)
    v_3 = v_0 * v_2
    load_1 = tl.load(up + (indices_0[:, None, None] * up_stride_0 + (0 + indices_1)[None, :, None] * up_stride_1 + (0 + indices_2)[None, None, :] * up_stride_2), mask_1[None, :, None] & mask_2[None, None, :], other=0)
    v_4 = tl.cast(load_1, tl.float32)
    v_5 = v_3 * v_4
    v_6 = tl.cast(v_5, x.dtype.element_ty)
    v_7 = tl.cast(v_6, tl.float32)
    v_8 = tl.abs(v_7)
    _mask_to = tl.where(tl.broadcast_to(mask_1[None, :, None] & mask_2[None, None, :], [_BLOCK_SIZE_0_to_float8, _RDIM_SIZE_1, _RDIM_SIZE_2]), v_8, tl.full([], float('-inf'), tl.float32))
    amax = tl.cast(language.max_propagate_nan(_mask_to, 2), tl.float32)
    v_9 = amax / largest
    v_10 = tl.full([], 0.0, tl.float32)
    v_11 = v_9 == v_10
    scalar_tensor = tl.full([], 1.0, tl.float32)
    scale = tl.where(v_11, scalar_tensor, v_9)
    subscript = scale[:, :, None]
    v_12 = v_7 / subscript
    neg = -1 * largest
    v_13 = language.maximum(v_12, neg)
    v_14 = language.minimum(v_13, largest)
    v_15 = tl.cast(v_14, codes.dtype.element_ty)
    tl.store(codes + (indices_0[:, None, None] * codes_stride_0 + (0 + indices_1)[None, :, None] * codes_stride_1 + (0 + indices_2)[None, None, :] * codes_stride_2), v_15, mask_1[None, :, None] & mask_2[None, None, :])
    tl.store(scales + (indices_0[:, None] * scales_stride_0 + (0 + indices_1)[None, :] * scales_stride_1), scale, mask_1[None, :])

def to_float8(x, up, codes, scales, largest: float, *, _launcher=language.launch):
    """The definition of quantize, of silu(x) · up rounded to the dtype of `x`."""
    rows = x.size(0)
    _RDIM_SIZE_1 = max(triton.next_power_of_2(x.size(1)), 1)
    _RDIM_SIZE_2 = max(triton.next_power_of_2(up.size(2)), 1)
    _launcher(_to_float8, (rows,), x, up, codes, scales, up.size(2), x.size(1), codes.stride(0), codes.stride(1), codes.stride(2), scales.stride(0), scales.stride(1), up.stride(0), up.stride(1), up.stride(2), x.stride(0), x.stride(1), x.stride(2), largest, _RDIM_SIZE_1, _RDIM_SIZE_2, num_warps=8, num_stages=1)


_BLOCK_SIZE_0_to_int8 = tl.constexpr(1)

@triton.jit
def _to_int8(x, up, codes, scales, up_size_2, x_size_1, codes_stride_0, codes_stride_1, codes_stride_2, scales_stride_0, scales_stride_1, up_stride_0, up_stride_1, up_stride_2, x_stride_0, x_stride_1, x_stride_2, largest, _RDIM_SIZE_1: tl.constexpr, _RDIM_SIZE_2: tl.constexpr):
    pid_0 = tl.program_id(0).to(tl.int64)
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int64)
    indices_1 = tl.arange(0, _RDIM_SIZE_1).to(tl.int64)
    mask_1 = indices_1 < x_size_1
    indices_2 = tl.arange(0, _RDIM_SIZE_2).to(tl.int64)
    mask_2 = indices_2 < up_size_2
    load = tl.load(x + (indices_0[:, None, None] * x_stride_0 + (0 + indices_1)[None, :, None] * x_stride_1 + (0 + indices_2)[None, None, :] * x_stride_2), mask_1[None, :, None] & mask_2[None, None, :], other=0)
    v_0 = tl.cast(load, tl.float32)
    v_1 = tl.cast(v_0, tl.float32)
    v_2 = tl.sigmoid(v_1)
    v_3 = v_0 * v_2
    load_1 = tl.load(up + (indices_0[:, None, None] * up_stride_0 + (0 + indices_1)[None, :, None] * up_stride_1 + (0 + indices_2)[None, None, :] * up_stride_2), mask_1[None, :, None] & mask_2[None, None, :], other=0)
    v_4 = tl.cast(load_1, tl.float32)
    v_5 = v_3 * v_4
    v_6 = tl.cast(v_5, x.dtype.element_ty)
    v_7 = tl.cast(v_6, tl.float32)
    v_8 = tl.abs(v_7)
    _mask_to = tl.where(tl.broadcast_to(mask_1[None, :, None] & mask_2[None, None, :], [_BLOCK_SIZE_0_to_int8, _RDIM_SIZE_1, _RDIM_SIZE_2]), v_8, tl.full([], float('-inf'), tl.float32))
    amax = tl.cast(language.max_propagate_nan(_mask_to, 2), tl.float32)
    v_9 = amax / largest
    v_10 = tl.full([], 0.0, tl.float32)
    v_11 = v_9 == v_10
    scalar_tensor = tl.full([], 1.0, tl.float32)
    scale = tl.where(v_11, scalar_tensor, v_9)
    subscript = scale[:, :, None]
    v_12 = v_7 / subscript
    neg = -1 * largest
    v_13 = language.maximum(v_12, neg)
    v_14 = language.minimum(v_13, largest)
    v_15 = language.nearest(v_14)
    v_16 = tl.cast(v_15, tl.int8)
    tl.store(codes + (indices_0[:, None, None] * codes_stride_0 + (0 + indices_1)[None, :, None] * codes_stride_1 + (0 + indices_2)[None, None, :] * codes_stride_2), v_16, mask_1[None, :, None] & mask_2[None, None, :])
    tl.store(scales + (indices_0[:, None] * scales_stride_0 + (0 + indices_1)[None, :] * scales_stride_1), scale, mask_1[None, :])

def to_int8(x, up, codes, scales, largest: float, *, _launcher=language.launch):
    """The definition of quantize, of silu(x) · up rounded to the dtype of `x`."""
    rows = x.size(0)
    _RDIM_SIZE_1 = max(triton.next_power_of_2(x.size(1)), 1)
    _RDIM_SIZE_2 = max(triton.next_power_of_2(up.size(2)), 1)
    _launcher(_to_int8, (rows,), x, up, codes, scales, up.size(2), x.size(1), codes.stride(0), codes.stride(1), codes.stride(2), scales.stride(0), scales.stride(1), up.stride(0), up.stride(1), up.stride(2), x.stride(0), x.stride(1), x.stride(2), largest, _RDIM_SIZE_1, _RDIM_SIZE_2, num_warps=8, num_stages=1)
