"""Calls of paged attention, and what plain float64 attention makes of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.api import tolerance
from polysilicon_nvidia.kernels import paged_attention as kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def call(
    sequences: Sequence[tuple[int, int]],  # (new tokens, tokens in the cache with them)
    device: str,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    block_size: int = 16,
    padding: int = 0,
    sinks: bool = False,
    **rule: Any,
) -> dict[str, Any]:
    """The arguments; blocks lie in any order, and what was never stored is NaN."""
    rng = torch.Generator().manual_seed(0)
    needed = [-(-length // block_size) for _, length in sequences]
    order = torch.randperm(sum(needed), generator=rng).split(needed)
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    caches = torch.full((2, sum(needed), block_size, kv_heads, size), math.nan)
    for row, (_, length) in enumerate(sequences):
        tables[row, : needed[row]] = order[row]
        slots = torch.arange(length)
        stored = torch.randn(2, length, kv_heads, size, generator=rng)
        caches[:, order[row][slots // block_size], slots % block_size] = stored
    new = torch.tensor([0, *(queries for queries, _ in sequences)])
    q = torch.randn(int(new.sum()) + padding, heads, size, generator=rng)
    lengths = [length for _, length in sequences]
    return {
        "q": q.to(device, dtype),
        "k_cache": caches[0].to(device, dtype),
        "v_cache": caches[1].to(device, dtype),
        "block_tables": tables.to(device),
        "query_starts": new.cumsum(0).to(device, torch.int32),
        "kv_lengths": torch.tensor(lengths, device=device, dtype=torch.int32),
        "scale": size**-0.5,
        "window": 0,
        "softcap": 0.0,
        "sinks": torch.randn(heads, generator=rng).to(device, dtype) if sinks else None,
        "causal": True,
        "max_query": int(new.max()),
        "max_kv": max(lengths),
    } | rule


def expected(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attention of each sequence over its keys laid out densely, in float64."""
    q, group = given["q"].double(), given["q"].shape[1] // given["k_cache"].shape[2]
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
    starts, lengths = given["query_starts"].tolist(), given["kv_lengths"].tolist()
    for row, length in enumerate(lengths):
        own = slice(starts[row], starts[row + 1])
        keys, values = (
            given[cache][given["block_tables"][row].long()].flatten(0, 1)[:length].double()
            for cache in ("k_cache", "v_cache")
        )
        scores = torch.einsum("qhd,khd->hqk", q[own], keys.repeat_interleave(group, 1))
        scores = scores * given["scale"]
        if cap := given["softcap"]:
            scores = cap * torch.tanh(scores / cap)
        position = torch.arange(length, device=q.device)
        ahead = position - position[length - (own.stop - own.start) :, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if given["causal"]:
            hidden |= ahead > 0
        if given["window"]:
            hidden |= ahead.abs() >= given["window"]
        scores = scores.masked_fill(hidden, -math.inf)
        if given["sinks"] is not None:
            sink = given["sinks"].double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sink), -1)
        lse[own] = scores.logsumexp(-1).t()
        weights = scores.softmax(-1)[..., :length]
        out[own] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
    return out, lse


def agree(
    sequences: Sequence[tuple[int, int]], device: str, dtype: torch.dtype, **options: Any
) -> None:
    """Runs the kernel and compares both of its results."""
    given = call(sequences, device, dtype, **options)
    with torch.inference_mode():
        found, wanted = kernel.paged_attention(**given), expected(given)
    # Scores of 16-bit numbers are exact products summed in float32, and so is their sum.
    for one, other, kind in zip(found, wanted, (dtype, torch.float32), strict=True):
        rtol, atol = tolerance(kind, max(given["max_kv"], given["q"].shape[2]))
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)
