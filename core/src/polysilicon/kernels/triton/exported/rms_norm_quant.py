# mypy: ignore-errors
# ruff: noqa
"""Exported from kernels/helion/rms_norm_quant.py by Helion 1.5.1; do not edit.

`python -m polysilicon.kernels.helion.export` writes it anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from polysilicon.kernels.triton.exported import language

_BLOCK_SIZE_0_to_float8 = tl.constexpr(1)

@triton.jit
def _to_float8(x, weight, codes, scales, codes_stride_0, codes_stride_1, codes_stride_2, scales_stride_0, scales_stride_1, weight_stride_0, weight_stride_1, x_stride_0, x_stride_1, x_stride_2, groups, size, eps, offset, largest, _RDIM_SIZE_1: tl.constexpr, _RDIM_SIZE_2: tl.constexpr):
    pid_0 = tl.program_id(0).to(tl.int64)
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int64)
    indices_1 = tl.arange(0, _RDIM_SIZE_1).to(tl.int64)
    mask_1 = indices_1 < groups
    indices_2 = tl.arange(0, _RDIM_SIZE_2).to(tl.int64)
    mask_2 = indices_2 < size
    load = tl.load(x + (indices_0[:, None, None] * x_stride_0 + (0 + indices_1)[None, :, None] * x_stride_1 + (0 + indices_2)[None, None, :] * x_stride_2), mask_1[None, :, None] & mask_2[None, None, :], other=0)
    v_0 = tl.cast(load, tl.float32)
    v_1 = v_0 * v_0
    sum_1 = tl.cast(tl.sum(v_1.to(tl.float32), 2), tl.float32)
    _mask_to_1 = tl.where(tl.broadcast_to(mask_1[None, :], [_BLOCK_SIZE_0_to_float8, _RDIM_SIZE_1]), sum_1, tl.full([], 0, tl.float32))
    sum_2 = tl.cast(tl.sum(_mask_to_1.to(tl.float32), 1), tl.float32)
    mul_1 = groups * size
    v_2 = tl.cast(mul_1, tl.float32)
    v_3 = sum_2 / v_2
    v_4 = v_3 + eps
    v_5 = tl.rsqrt(v_4)
    subscript = v_5[:, None, None]
    v_6 = v_0 * subscript
    load_1 = tl.load(weight + ((0 + indices_1)[:, None] * weight_stride_0 + (0 + indices_2)[None, :] * weight_stride_1), mask_1[:, None] & mask_2[None, :], other=0)
    v_7 = tl.cast(load_1, tl.float32)
    v_8 = v_7 + offset
    subscript_1 = v_8[None, :, :]
    v_9 = v_6 * subscript_1
    v_10 = tl.cast(v_9, x.dtype.element_ty)
    v_11 = tl.cast(v_10, tl.float32)
    v_12 = tl.abs(v_11)
    _mask_to_2 = tl.where(tl.broadcast_to(mask_1[None, :, None] & mask_2[None, None, :], [_BLOCK_SIZE_0_to_float8, _RDIM_SIZE_1, _RDIM_SIZE_2]), v_12, tl.full([], float('-inf'), tl.float32))
    amax = tl.cast(language.max_propagate_nan(_mask_to_2, 2), tl.float32)
    v_13 = amax / largest
    v_14 = tl.full([], 0.0, tl.float32)
    v_15 = v_13 == v_14
    scalar_tensor = tl.full([], 1.0, tl.float32)
    scale = tl.where(v_15, scalar_tensor, v_13)
    subscript_2 = scale[:, :, None]
    v_16 = v_11 / subscript_2
    neg = -1 * largest
    v_17 = language.maximum(v_16, neg)
    v_18 = language.minimum(v_17, largest)
    v_19 = tl.cast(v_18, codes.dtype.element_ty)
    tl.store(codes + (indices_0[:, None, None] * codes_stride_0 + (0 + indices_1)[None, :, None] * codes_stride_1 + (0 + indices_2)[None, None, :] * codes_stride_2), v_19, mask_1[None, :, None] & mask_2[None, None, :])
    tl.store(scales + (indices_0[:, None] * scales_stride_0 + (0 + indices_1)[None, :] * scales_stride_1), scale, mask_1[None, :])

def to_float8(x, weight, codes, scales, eps: float, offset: float, largest: float, *, _launcher=language.launch):
    """The definition of quantize, of rms_norm rounded to the dtype of `x`."""
    rows, groups, size = x.size()
    _RDIM_SIZE_1 = max(triton.next_power_of_2(groups), 1)
    _RDIM_SIZE_2 = max(triton.next_power_of_2(size), 1)
    _launcher(_to_float8, (rows,), x, weight, codes, scales, codes.stride(0), codes.stride(1), codes.stride(2), scales.stride(0), scales.stride(1), weight.stride(0), weight.stride(1), x.stride(0), x.stride(1), x.stride(2), groups, size, eps, offset, largest, _RDIM_SIZE_1, _RDIM_SIZE_2, num_warps=8, num_stages=1)


_BLOCK_SIZE_0_to_int8 = tl.constexpr(1)

@triton.jit
def _to_int8(x, weight, codes, scales, codes_stride_0, codes_stride_1, codes_stride_2, scales_stride_0, scales_stride_1, weight_stride_0, weight_stride_1, x_stride_0, x_stride_1, x_stride_2, groups, size, eps, offset, largest, _RDIM_SIZE_1: tl.constexpr, _RDIM_SIZE_2: tl.constexpr):
    pid_0 = tl.program_id(0).to(tl.int64)
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int64)
    indices_1 = tl.arange(0, _RDIM_SIZE_1).to(tl.int64)
    mask_1 = indices_1 < groups
    indices_2 = tl.arange(0, _RDIM_SIZE_2).to(tl.int64)
    mask_2 = indices_2 < size
    load = tl.load(x + (indices_0[:, None, None] * x_stride_0 + (0 + indices_1)[None, :, None] * x_stride_1 + (0 + indices_2)[None, None, :] * x_stride_2), mask_1[None, :, None] & mask_2[None, None, :], other=0)
    v_0 = tl.cast(load, tl.float32)
    v_1 = v_0 * v_0
    sum_1 = tl.cast(tl.sum(v_1.to(tl.float32), 2), tl.float32)
    _mask_to_1 = tl.where(tl.broadcast_to(mask_1[None, :], [_BLOCK_SIZE_0_to_int8, _RDIM_SIZE_1]), sum_1, tl.full([], 0, tl.float32))
    sum_2 = tl.cast(tl.sum(_mask_to_1.to(tl.float32), 1), tl.float32)
    mul_1 = groups * size
    v_2 = tl.cast(mul_1, tl.float32)
    v_3 = sum_2 / v_2
    v_4 = v_3 + eps
    v_5 = tl.rsqrt(v_4)
    subscript = v_5[:, None, None]
    v_6 = v_0 * subscript
    load_1 = tl.load(weight + ((0 + indices_1)[:, None] * weight_stride_0 + (0 + indices_2)[None, :] * weight_stride_1), mask_1[:, None] & mask_2[None, :], other=0)
    v_7 = tl.cast(load_1, tl.float32)
    v_8 = v_7 + offset
    subscript_1 = v_8[None, :, :]
    v_9 = v_6 * subscript_1
    v_10 = tl.cast(v_9, x.dtype.element_ty)
    v_11 = tl.cast(v_10, tl.float32)
    v_12 = tl.abs(v_11)
    _mask_to_2 = tl.where(tl.broadcast_to(mask_1[None, :, None] & mask_2[None, None, :], [_BLOCK_SIZE_0_to_int8, _RDIM_SIZE_1, _RDIM_SIZE_2]), v_12, tl.full([], float('-inf'), tl.float32))
    amax = tl.cast(language.max_propagate_nan(_mask_to_2, 2), tl.float32)
    v_13 = amax / largest
    v_14 = tl.full([], 0.0, tl.float32)
    v_15 = v_13 == v_14
    scalar_tensor = tl.full([], 1.0, tl.float32)
    scale = tl.where(v_15, scalar_tensor, v_13)
    subscript_2 = scale[:, :, None]
    v_16 = v_11 / subscript_2
    neg = -1 * largest
    v_17 = language.maximum(v_16, neg)
    v_18 = language.minimum(v_17, largest)
    v_19 = language.nearest(v_18)
    v_20 = tl.cast(v_19, tl.int8)
    tl.store(codes + (indices_0[:, None, None] * codes_stride_0 + (0 + indices_1)[None, :, None] * codes_stride_1 + (0 + indices_2)[None, None, :] * codes_stride_2), v_20, mask_1[None, :, None] & mask_2[None, None, :])
    tl.store(scales + (indices_0[:, None] * scales_stride_0 + (0 + indices_1)[None, :] * scales_stride_1), scale, mask_1[None, :])

def to_int8(x, weight, codes, scales, eps: float, offset: float, largest: float, *, _launcher=language.launch):
    """The definition of quantize, of rms_norm rounded to the dtype of `x`."""
    rows, groups, size = x.size()
    _RDIM_SIZE_1 = max(triton.next_power_of_2(groups), 1)
    _RDIM_SIZE_2 = max(triton.next_power_of_2(size), 1)
    _launcher(_to_int8, (rows,), x, weight, codes, scales, codes.stride(0), codes.stride(1), codes.stride(2), scales.stride(0), scales.stride(1), weight.stride(0), weight.stride(1), x.stride(0), x.stride(1), x.stride(2), groups, size, eps, offset, largest, _RDIM_SIZE_1, _RDIM_SIZE_2, num_warps=8, num_stages=1)
