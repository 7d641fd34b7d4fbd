"""Attention over a paged cache in Triton: prefill, decode and mixtures by one kernel.

A program serves the queries of one tile for one key head: the heads that share it are rows of the
tile beside the tokens, so that a key is read once for all of them. Few programs over a long context
are split along the keys, and `combine` adds up the parts (FlashDecoding).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from polysilicon_nvidia.chips import CHIPS
from polysilicon_nvidia.kernels.paged_attention_triton import attend, combine
from polysilicon_nvidia.kernels.tiles import tile_for

if TYPE_CHECKING:
    from torch import Tensor

_LOG2E = math.log2(math.e)

#: Keys that a split has at the least: fewer cost more to add up than they save.
LEAST_KEYS = 128
MOST_SPLITS = 64
#: Warps that a multiprocessor's registers hold, at the 255 of a thread that tiles may take.
WARPS_PER_SM = 8


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What the launch depends on; `sms` and `arch` are the device's own facts."""

    arch: str
    sms: int


def paged_attention(
    q: Tensor,  # [T, h, d]
    k_cache: Tensor,  # [blocks, block_size, hk, d]
    v_cache: Tensor,  # [blocks, block_size, hk, dv]
    block_tables: Tensor,  # int32 [B, max_blocks]
    query_starts: Tensor,  # int32 [B + 1], rising
    kv_lengths: Tensor,  # int32 [B]
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,  # [h]
    causal: bool,
    max_query: int,
    max_kv: int,
) -> tuple[Tensor, Tensor]:  # [T, h, dv], float32 [T, h]
    """The op's contract (polysilicon/ops/paged_attention.py), without a read on the host."""
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"paged_attention.nvidia_triton got queries in {q.dtype} and a cache in "
            f"{k_cache.dtype} and {v_cache.dtype}: it takes one dtype for all three"
        )
    return launch(
        chip_of(q.device),
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        kv_lengths,
        scale,
        window,
        softcap,
        sinks,
        causal,
        max_query,
        max_kv,
    )


def fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    causal: bool,
    max_query: int,
    max_kv: int,
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results."""
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip that a tensor lies on; on the CPU, where Triton interprets, an H200's sizes."""
    if device.type == "cpu":
        return Chip(arch=CHIPS["h200"].arch, sms=CHIPS["h200"].sms)
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        arch=f"sm{properties.major}{properties.minor}", sms=properties.multi_processor_count
    )


def launch(
    chip: Chip,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    causal: bool,
    max_query: int,
    max_kv: int,
) -> tuple[Tensor, Tensor]:
    """The kernel with the tile and the splits that suit a chip."""
    (tokens, heads, size), (_, block_size, kv_heads, value_size) = q.shape, v_cache.shape
    out = q.new_empty(tokens, heads, value_size)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    if not tokens:
        return out, lse
    group, sequences = heads // kv_heads, kv_lengths.shape[0]
    tile = tile_for(chip.arch, max(size, value_size), q.element_size(), group, max_query)
    tile_tokens = tile.rows // group
    # Tiles of sequence i are numbered from query_starts[i] // tile_tokens + i on.
    one_tile = max_query <= tile_tokens
    tiles = sequences if one_tile else sequences + tokens // tile_tokens
    seen = min(max_kv, window + max_query) if window else max_kv
    slots = chip.sms * (WARPS_PER_SM // tile.warps)
    splits = splits_for(tiles * kv_heads, seen // LEAST_KEYS, slots)
    split = splits > 1
    parts = (out, lse)
    if split:
        part = q.new_empty(splits, tokens, heads, value_size, dtype=torch.float32)
        parts = (part, q.new_empty(splits, tokens, heads, dtype=torch.float32))
    if block_tables.stride(-1) != 1:
        block_tables = block_tables.contiguous()
    # The tanh of a softcap is made of the same power of two.
    factor = scale * _LOG2E * (2 / softcap if softcap else 1)
    # Padding has programs of its own, or is left to `combine`.
    attend[((tiles + (not split)) * kv_heads, splits)](
        *(*parts, q, k_cache, v_cache, block_tables, query_starts, kv_lengths, sinks),
        *(factor, softcap * _LOG2E, window, tokens, sequences, tiles, kv_heads),
        *(*q.stride(), *k_cache.stride(), *v_cache.stride(), block_tables.stride(0)),
        GROUP=group,
        SIZE=size,
        VALUE=value_size,
        BLOCK_SIZE=block_size,
        ROWS=tile.rows,
        KEYS=tile.keys,
        BLOCK_D=_padded(size),
        BLOCK_V=_padded(value_size),
        CAUSAL=causal,
        WINDOWED=window > 0,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        ONE_TILE=one_tile,
        SPLIT=split,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if split:
        block_v, most_splits = _padded(value_size), triton.next_power_of_2(splits)
        combine[(tokens * heads,)](
            *(out, lse, *parts, query_starts, sinks, tokens, sequences, heads, splits),
            VALUE=value_size,
            BLOCK_V=block_v,
            SPLITS=most_splits,
            SINKS=sinks is not None,
            # 32 numbers of each thread, so that none spills.
            num_warps=max(1, min(16, block_v * most_splits // 1024)),
        )
    return out, lse


def _padded(size: int) -> int:
    """The power of two that a matrix instruction takes."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


@functools.lru_cache(maxsize=4096)
def splits_for(programs: int, most: int, slots: int) -> int:
    """Into how many parts to split the keys, so that the last wave of programs is well filled."""
    if programs >= 0.8 * slots:
        return 1
    filled = {}
    for splits in range(1, max(1, min(most, MOST_SPLITS)) + 1):
        waves = max(1, programs) * splits / slots
        filled[splits] = waves / math.ceil(waves)
    good = 0.85 * max(filled.values())
    return next(splits for splits, share in filled.items() if share >= good)
