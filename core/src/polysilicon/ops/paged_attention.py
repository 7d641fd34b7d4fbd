"""Attention of a batch of sequences over a paged cache: prefill, decode and mixtures in one call.

T tokens of B sequences laid end to end, h query heads, hk key heads, d and dv head sizes. The last
query of a sequence stands at its last cached position. Tokens past `query_starts[B]` are padding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from polysilicon.ops.attention import KEYS, apply_sinks, attend
from polysilicon.ops.contract import Op
from polysilicon.ops.paged_plan import Rule, plan_for
from polysilicon.ops.paged_samples import problem_call, samples

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import Tensor


def reference(
    q: Tensor,  # [T, h, d]
    k_cache: Tensor,  # [blocks, block_size, hk, d]
    v_cache: Tensor,  # [blocks, block_size, hk, dv]
    block_tables: Tensor,  # int32 [B, max_blocks]
    query_starts: Tensor,  # int32 [B + 1], rising
    kv_lengths: Tensor,  # int32 [B], this call's tokens included
    scale: float,
    window: int,  # 0: none, else keys j with i - window < j <= i
    softcap: float,  # 0: none
    sinks: Tensor | None,  # [h]
    causal: bool,
    max_query: int,  # upper bound of the queries of one sequence
    max_kv: int,  # upper bound of kv_lengths
) -> tuple[Tensor, Tensor]:  # [T, h, dv], [T, h]
    """The definition in float64, one token at a time over a list of the slots that it sees."""
    (tokens, heads, _), (_, block_size, kv_heads, value_size) = q.shape, v_cache.shape
    out = torch.zeros(tokens, heads, value_size, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=q.device)
    bounds, lengths, tables = query_starts.tolist(), kv_lengths.tolist(), block_tables.tolist()
    for row, length in enumerate(lengths):
        for token in range(bounds[row], bounds[row + 1]):
            position = length - (bounds[row + 1] - token)
            seen = [
                j
                for j in range(length)
                if (j <= position or not causal) and (not window or abs(position - j) < window)
            ]
            blocks = [tables[row][j // block_size] for j in seen]
            offsets = [j % block_size for j in seen]
            # A key head serves a run of query heads.
            keys = k_cache[blocks, offsets].double().repeat_interleave(heads // kv_heads, 1)
            values = v_cache[blocks, offsets].double().repeat_interleave(heads // kv_heads, 1)
            scores = (keys * q[token].double()).sum(-1) * scale  # [seen, h]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[None]))
            lse[token] = torch.logsumexp(scores, 0)
            weights = torch.softmax(scores, 0)[: len(seen)]
            out[token] = (weights[..., None] * values).sum(0)
    return out, lse


def torch_kernel(
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
    """One fused attention call a sequence, on a view of the cache where its blocks are adjacent."""
    tokens, heads, _ = q.shape
    plan = plan_for(block_tables, query_starts, kv_lengths, k_cache.shape, tokens)
    by_head = q.transpose(0, 1)[None]
    outs, lses = [], []
    for chunk in plan.chunks(Rule(window, causal), q):
        out, lse = attend(
            by_head if chunk.queries == tokens else by_head[:, :, chunk.first : chunk.last],
            chunk.read(k_cache),
            chunk.read(v_cache),
            chunk.mask,
            scale,
            chunk.triangle,
            softcap,
        )
        outs.append(out.transpose(1, 2))
        lses.append(lse.transpose(1, 2))
    if plan.tokens < tokens or not outs:
        padding = tokens - plan.tokens
        outs.append(q.new_zeros(1, padding, heads, v_cache.shape[3]))
        lses.append(q.new_full((1, padding, heads), -math.inf, dtype=torch.float32))
    out, lse = (torch.cat(parts, 1)[0] if len(parts) > 1 else parts[0][0] for parts in (outs, lses))
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
        lse[plan.tokens :] = -math.inf
    # As the shape function says; a no-op after the fused kernel.
    return out.contiguous(), lse.contiguous()


def paged_attention_fake(
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
    """Shape function of every kernel of this op."""
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return max(int(kwargs["q"].shape[2]), max(kwargs["kv_lengths"].tolist(), default=0))


OP = Op(
    name="paged_attention",
    schema=(
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_starts, "
        "Tensor kv_lengths, float scale, int window, float softcap, Tensor? sinks, bool causal, "
        "SymInt max_query, SymInt max_kv) -> (Tensor, Tensor)"
    ),
    keys=KEYS | {"block_size"},
    reference=reference,
    samples=samples,
    reduction=_reduction,
    tokens=len,
    inputs=problem_call,
    results=("input", "float32"),
    source="https://arxiv.org/abs/2309.06180",
)
