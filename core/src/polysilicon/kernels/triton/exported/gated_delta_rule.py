# mypy: ignore-errors
# ruff: noqa
"""Exported from kernels/helion/gated_delta_rule.py by Helion 1.5.1; do not edit.

`python -m polysilicon.kernels.helion.export` writes it anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from polysilicon.kernels.triton.exported import language

_BLOCK_SIZE_2_unit_length = tl.constexpr(32)

@triton.jit
def _unit_length(q, query_starts, seen, state_slots, state, k, g, v, beta, out, q_size_2, beta_stride_0, beta_stride_1, g_stride_0, g_stride_1, k_stride_0, k_stride_1, k_stride_2, out_stride_0, out_stride_1, out_stride_2, q_stride_0, q_stride_1, q_stride_2, query_starts_stride_0, seen_stride_0, state_stride_0, state_stride_1, state_stride_2, state_stride_3, state_slots_stride_0, v_stride_0, v_stride_1, v_stride_2, values, sequences, heads, shared, scale, _RDIM_SIZE_4: tl.constexpr):
    num_blocks_0 = sequences
    num_blocks_1 = heads
    pid_0 = tl.program_id(0).to(tl.int64) % num_blocks_0
    pid_1 = tl.program_id(0).to(tl.int64) // num_blocks_0 % num_blocks_1
    pid_2 = tl.program_id(0).to(tl.int64) // (num_blocks_0 * num_blocks_1)
    offset_0 = pid_0
    offset_1 = pid_1
    offset_2 = pid_2 * _BLOCK_SIZE_2_unit_length
    indices_2 = (offset_2 + tl.arange(0, _BLOCK_SIZE_2_unit_length)).to(tl.int64)
    mask_2 = indices_2 < values
    indices_4 = tl.arange(0, _RDIM_SIZE_4).to(tl.int64)
    mask_4 = indices_4 < q_size_2
    begin = tl.load(query_starts + offset_0 * query_starts_stride_0, None)
    add = 1 + offset_0
    end = tl.load(query_starts + add * query_starts_stride_0, None)
    load_2 = tl.load(seen + offset_0 * seen_stride_0, None)
    v_0 = tl.full([], 0, tl.int32)
    v_1 = load_2 == v_0
    first = tl.load(state_slots + offset_0 * state_slots_stride_0, None)
    v_2 = tl.full([], 0, tl.int32)
    v_3 = first >= v_2
    v_4 = end > begin
    v_5 = v_3 & v_4
    v_6 = tl.full([], 1, tl.int32)
    v_7 = first + v_6
    where = tl.where(v_5, v_7, first)
    for offset_3 in tl.range(tl.cast(first, tl.int64), tl.cast(where, tl.int64)):
        v_1_copy = v_1
        begin_copy = begin
        end_copy = end
        v_1_copy_0 = v_1_copy
        begin_copy_0 = begin_copy
        end_copy_0 = end_copy
        load = tl.load(state + (offset_3 * state_stride_0 + offset_1 * state_stride_1 + (0 + indices_4)[:, None] * state_stride_2 + indices_2[None, :] * state_stride_3), mask_4[:, None] & mask_2[None, :], other=0)
        scalar_tensor = tl.full([], 0.0, tl.float32)
        held = tl.where(v_1_copy_0, scalar_tensor, load)
        for offset_5 in tl.range(tl.cast(begin_copy_0, tl.int64), tl.cast(end_copy_0, tl.int64)):
            held_copy = held
            held_copy_0 = held_copy
            floordiv = language.quotient(offset_1, shared)
            load_3 = tl.load(q + (offset_5 * q_stride_0 + floordiv * q_stride_1 + (0 + indices_4) * q_stride_2), mask_4, other=0)
            v_8 = tl.cast(load_3, tl.float32)
            load_1 = tl.load(k + (offset_5 * k_stride_0 + floordiv * k_stride_1 + (0 + indices_4) * k_stride_2), mask_4, other=0)
            v_9 = tl.cast(load_1, tl.float32)
            v_10 = v_8 * v_8
            sum_1 = tl.cast(tl.sum(v_10.to(tl.float32), 0), tl.float32)
            v_11 = tl.full([], 1e-06, tl.float32)
            v_12 = sum_1 + v_11
            v_13 = tl.rsqrt(v_12)
            v_14 = v_8 * v_13
            v_15 = v_9 * v_9
            sum_2 = tl.cast(tl.sum(v_15.to(tl.float32), 0), tl.float32)
            v_16 = tl.full([], 1e-06, tl.float32)
            v_17 = sum_2 + v_16
            v_18 = tl.rsqrt(v_17)
            v_19 = v_9 * v_18
            load_4 = tl.load(g + (offset_5 * g_stride_0 + offset_1 * g_stride_1), None)
            v_20 = tl.cast(load_4, tl.float32)
            v_21 = tl.exp(v_20)
            v_22 = held_copy_0 * v_21
            load_5 = tl.load(v + (offset_5 * v_stride_0 + offset_1 * v_stride_1 + indices_2 * v_stride_2), mask_2, other=0)
            v_23 = tl.cast(load_5, tl.float32)
            subscript = v_19[:, None]
            v_24 = v_22 * subscript
            _mask_to_2 = tl.where(mask_4[:, None] & mask_2[None, :], v_24, tl.full([], 0, tl.float32))
            sum_3 = tl.cast(tl.sum(_mask_to_2.to(tl.float32), 0), tl.float32)
            v_25 = v_23 - sum_3
            load_6 = tl.load(beta + (offset_5 * beta_stride_0 + offset_1 * beta_stride_1), None)
            v_26 = tl.cast(load_6, tl.float32)
            v_27 = v_25 * v_26
            subscript_1 = v_19[:, None]
            subscript_2 = v_27[None, :]
            v_28 = subscript_1 * subscript_2
            held = v_22 + v_28
            subscript_3 = v_14[:, None]
            v_30 = held * subscript_3
            _mask_to_3 = tl.where(mask_4[:, None] & mask_2[None, :], v_30, tl.full([], 0, tl.float32))
            sum_4 = tl.cast(tl.sum(_mask_to_3.to(tl.float32), 0), tl.float32)
            v_31 = sum_4 * scale
            v_32 = tl.cast(v_31, out.dtype.element_ty)
            tl.store(out + (offset_5 * out_stride_0 + offset_1 * out_stride_1 + indices_2 * out_stride_2), v_32, mask_2)
        tl.store(state + (offset_3 * state_stride_0 + offset_1 * state_stride_1 + (0 + indices_4)[:, None] * state_stride_2 + indices_2[None, :] * state_stride_3), held, mask_4[:, None] & mask_2[None, :])

def unit_length(q, k, v, g, beta, state, query_starts, state_slots, seen, out, scale: float, normalize, shared: int, *, _launcher=language.launch):
    """The recurrence of arXiv:2412.06464, one token at a time, in float32."""
    sequences, heads, values = (state_slots.size(0), v.size(1), v.size(2))
    _BLOCK_SIZE_2_unit_length = 32
    _RDIM_SIZE_4 = max(triton.next_power_of_2(q.size(2)), 1)
    _launcher(_unit_length, (sequences * heads * ((values + _BLOCK_SIZE_2_unit_length - 1) // _BLOCK_SIZE_2_unit_length),), q, query_starts, seen, state_slots, state, k, g, v, beta, out, q.size(2), beta.stride(0), beta.stride(1), g.stride(0), g.stride(1), k.stride(0), k.stride(1), k.stride(2), out.stride(0), out.stride(1), out.stride(2), q.stride(0), q.stride(1), q.stride(2), query_starts.stride(0), seen.stride(0), state.stride(0), state.stride(1), state.stride(2), state.stride(3), state_slots.stride(0), v.stride(0), v.stride(1), v.stride(2), values, sequences, heads, shared, scale, _RDIM_SIZE_4, num_warps=8, num_stages=1)


_BLOCK_SIZE_2_as_given = tl.constexpr(32)

@triton.jit
def _as_given(q, query_starts, seen, state_slots, state, k, g, v, beta, out, q_size_2, beta_stride_0, beta_stride_1, g_stride_0, g_stride_1, k_stride_0, k_stride_1, k_stride_2, out_stride_0, out_stride_1, out_stride_2, q_stride_0, q_stride_1, q_stride_2, query_starts_stride_0, seen_stride_0, state_stride_0, state_stride_1, state_stride_2, state_stride_3, state_slots_stride_0, v_stride_0, v_stride_1, v_stride_2, values, sequences, heads, shared, scale, _RDIM_SIZE_4: tl.constexpr):
    num_blocks_0 = sequences
    num_blocks_1 = heads
    pid_0 = tl.program_id(0).to(tl.int64) % num_blocks_0
    pid_1 = tl.program_id(0).to(tl.int64) // num_blocks_0 % num_blocks_1
    pid_2 = tl.program_id(0).to(tl.int64) // (num_blocks_0 * num_blocks_1)
    offset_0 = pid_0
    offset_1 = pid_1
    offset_2 = pid_2 * _BLOCK_SIZE_2_as_given
    indices_2 = (offset_2 + tl.arange(0, _BLOCK_SIZE_2_as_given)).to(tl.int64)
    mask_2 = indices_2 < values
    indices_4 = tl.arange(0, _RDIM_SIZE_4).to(tl.int64)
    mask_4 = indices_4 < q_size_2
    begin = tl.load(query_starts + offset_0 * query_starts_stride_0, None)
    add = 1 + offset_0
    end = tl.load(query_starts + add * query_starts_stride_0, None)
    load_2 = tl.load(seen + offset_0 * seen_stride_0, None)
    v_0 = tl.full([], 0, tl.int32)
    v_1 = load_2 == v_0
    first = tl.load(state_slots + offset_0 * state_slots_stride_0, None)
    v_2 = tl.full([], 0, tl.int32)
    v_3 = first >= v_2
    v_4 = end > begin
    v_5 = v_3 & v_4
    v_6 = tl.full([], 1, tl.int32)
    v_7 = first + v_6
    where = tl.where(v_5, v_7, first)
    for offset_3 in tl.range(tl.cast(first, tl.int64), tl.cast(where, tl.int64)):
        v_1_copy = v_1
        begin_copy = begin
        end_copy = end
        v_1_copy_0 = v_1_copy
        begin_copy_0 = begin_copy
        end_copy_0 = end_copy
        load = tl.load(state + (offset_3 * state_stride_0 + offset_1 * state_stride_1 + (0 + indices_4)[:, None] * state_stride_2 + indices_2[None, :] * state_stride_3), mask_4[:, None] & mask_2[None, :], other=0)
        scalar_tensor = tl.full([], 0.0, tl.float32)
        held = tl.where(v_1_copy_0, scalar_tensor, load)
        for offset_5 in tl.range(tl.cast(begin_copy_0, tl.int64), tl.cast(end_copy_0, tl.int64)):
            held_copy = held
            held_copy_0 = held_copy
            floordiv = language.quotient(offset_1, shared)
            load_3 = tl.load(q + (offset_5 * q_stride_0 + floordiv * q_stride_1 + (0 + indices_4) * q_stride_2), mask_4, other=0)
            v_8 = tl.cast(load_3, tl.float32)
            load_1 = tl.load(k + (offset_5 * k_stride_0 + floordiv * k_stride_1 + (0 + indices_4) * k_stride_2), mask_4, other=0)
            v_9 = tl.cast(load_1, tl.float32)
            load_4 = tl.load(g + (offset_5 * g_stride_0 + offset_1 * g_stride_1), None)
            v_10 = tl.cast(load_4, tl.float32)
            v_11 = tl.exp(v_10)
            v_12 = held_copy_0 * v_11
            load_5 = tl.load(v + (offset_5 * v_stride_0 + offset_1 * v_stride_1 + indices_2 * v_stride_2), mask_2, other=0)
            v_13 = tl.cast(load_5, tl.float32)
            subscript = v_9[:, None]
            v_14 = v_12 * subscript
            _mask_to = tl.where(mask_4[:, None] & mask_2[None, :], v_14, tl.full([], 0, tl.float32))
            sum_1 = tl.cast(tl.sum(_mask_to.to(tl.float32), 0), tl.float32)
            v_15 = v_13 - sum_1
            load_6 = tl.load(beta + (offset_5 * beta_stride_0 + offset_1 * beta_stride_1), None)
            v_16 = tl.cast(load_6, tl.float32)
            v_17 = v_15 * v_16
            subscript_1 = v_9[:, None]
            subscript_2 = v_17[None, :]
            v_18 = subscript_1 * subscript_2
            held = v_12 + v_18
            subscript_3 = v_8[:, None]
            v_20 = held * subscript_3
            _mask_to_1 = tl.where(mask_4[:, None] & mask_2[None, :], v_20, tl.full([], 0, tl.float32))
            sum_2 = tl.cast(tl.sum(_mask_to_1.to(tl.float32), 0), tl.float32)
            v_21 = sum_2 * scale
            v_22 = tl.cast(v_21, out.dtype.element_ty)
            tl.store(out + (offset_5 * out_stride_0 + offset_1 * out_stride_1 + indices_2 * out_stride_2), v_22, mask_2)
        tl.store(state + (offset_3 * state_stride_0 + offset_1 * state_stride_1 + (0 + indices_4)[:, None] * state_stride_2 + indices_2[None, :] * state_stride_3), held, mask_4[:, None] & mask_2[None, :])

def as_given(q, k, v, g, beta, state, query_starts, state_slots, seen, out, scale: float, normalize, shared: int, *, _launcher=language.launch):
    """The recurrence of arXiv:2412.06464, one token at a time, in float32."""
    sequences, heads, values = (state_slots.size(0), v.size(1), v.size(2))
    _BLOCK_SIZE_2_as_given = 32
    _RDIM_SIZE_4 = max(triton.next_power_of_2(q.size(2)), 1)
    _launcher(_as_given, (sequences * heads * ((values + _BLOCK_SIZE_2_as_given - 1) // _BLOCK_SIZE_2_as_given),), q, query_starts, seen, state_slots, state, k, g, v, beta, out, q.size(2), beta.stride(0), beta.stride(1), g.stride(0), g.stride(1), k.stride(0), k.stride(1), k.stride(2), out.stride(0), out.stride(1), out.stride(2), q.stride(0), q.stride(1), q.stride(2), query_starts.stride(0), seen.stride(0), state.stride(0), state.stride(1), state.stride(2), state.stride(3), state_slots.stride(0), v.stride(0), v.stride(1), v.stride(2), values, sequences, heads, shared, scale, _RDIM_SIZE_4, num_warps=8, num_stages=1)
