"""Multi-head latent attention over a paged cache of latents, the projections absorbed.

T tokens of B sequences laid end to end, h query heads. A slot of the cache holds one token's
latent and the rotated part of its key (`latent_store`); a query is its content part in latent
space, then its rotated part; the latents are the values too. Each head's product with W_UV comes
after. The last query of a sequence stands at its last cached position. Tokens past
`query_starts[B]` are padding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.ops.attention import attend
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.paged_plan import Chunk, Rule, plan_for
from polysilicon.ops.paged_samples import CONTEXT, MOST_DECODING, paged_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from polysilicon.records import Problem


def reference(
    q: Tensor,  # [T, h, rank + rope]
    cache: Tensor,  # [blocks, block_size, rank + rope]
    block_tables: Tensor,  # int32 [B, max_blocks]
    query_starts: Tensor,  # int32 [B + 1], rising
    kv_lengths: Tensor,  # int32 [B], this call's tokens included
    rank: int,
    scale: float,
    causal: bool,
    max_query: int,  # upper bound of the queries of one sequence
    max_kv: int,  # upper bound of kv_lengths
) -> tuple[Tensor, Tensor]:  # [T, h, rank], [T, h]
    """The definition in float64, one token at a time over a list of the slots that it sees."""
    (tokens, heads, _), block_size = q.shape, cache.shape[1]
    out = torch.zeros(tokens, heads, rank, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=q.device)
    bounds, lengths, tables = query_starts.tolist(), kv_lengths.tolist(), block_tables.tolist()
    for row, length in enumerate(lengths):
        for token in range(bounds[row], bounds[row + 1]):
            position = length - (bounds[row + 1] - token)
            seen = range(position + 1 if causal else length)
            blocks = [tables[row][j // block_size] for j in seen]
            slots = cache[blocks, [j % block_size for j in seen]].double()  # [seen, rank + rope]
            scores = q[token].double() @ slots.T * scale  # [h, seen]
            lse[token] = torch.logsumexp(scores, 1)
            out[token] = torch.softmax(scores, 1) @ slots[:, :rank]
    return out, lse


def torch_kernel(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    rank: int,
    scale: float,
    causal: bool,
    max_query: int,
    max_kv: int,
) -> tuple[Tensor, Tensor]:
    """One fused attention call a sequence, on a view of the cache where its blocks are adjacent."""
    tokens, heads, _ = q.shape
    slots = cache[:, :, None]  # all heads read one key
    plan = plan_for(block_tables, query_starts, kv_lengths, slots.shape, tokens)
    outs, lses = [], []
    for chunk in plan.chunks(Rule(0, causal), q):
        out, lse = _attend(q[chunk.first : chunk.last], chunk.read(slots), chunk, scale)
        outs.append(out[..., :rank])
        lses.append(lse)
    padding = tokens - plan.tokens
    outs.append(q.new_zeros(padding, heads, rank))
    lses.append(q.new_full((padding, heads), -math.inf, dtype=torch.float32))
    return torch.cat(outs), torch.cat(lses)


def _attend(
    q: Tensor,  # [queries, h, rank + rope]
    keys: Tensor,  # [1, 1, keys, rank + rope]
    chunk: Chunk,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [queries, h, rank + rope], [queries, h]
    """The values are the whole rows: the fused kernel wants both of one size."""
    if chunk.queries == 1:
        # Heads that share a key become rows of one product, which needs no mask.
        out, lse = attend(q[None], keys, keys, None, scale, False, 0.0)
        return out[0], lse[0]
    out, lse = attend(q.transpose(0, 1)[None], keys, keys, chunk.mask, scale, chunk.triangle, 0.0)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def latent_attention_fake(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    rank: int,
    scale: float,
    causal: bool,
    max_query: int,
    max_kv: int,
) -> tuple[Tensor, Tensor]:
    """Shape function of every kernel of this op."""
    out = q.new_empty(q.shape[0], q.shape[1], rank)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def latent_call(
    name: str,
    sequences: Sequence[tuple[int, int]],  # (new tokens, tokens in the cache with them)
    dtype: torch.dtype,
    device: torch.device,
    *,
    rank: int = 16,
    rope: int = 8,
    tokens_first: bool = False,
    **options: Any,
) -> Sample:
    """A call whose unused slots hold NaN: a kernel that reads one shows it."""
    paged = paged_call(name, sequences, dtype, device, kv_heads=1, size=rank + rope, **options)
    cache = paged.kwargs["k_cache"][:, :, 0]
    if tokens_first:
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    kept = ("block_tables", "query_starts", "kv_lengths", "scale", "causal", "max_query", "max_kv")
    shared = {key: paged.kwargs[key] for key in kept}
    return Sample(name=name, kwargs={"q": paged.kwargs["q"], "cache": cache, "rank": rank} | shared)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Sizes 0, 1, prime and one off a block (of 4); every option alone and together."""

    def make(name: str, sequences: Sequence[tuple[int, int]], **options: Any) -> Sample:
        return latent_call(name, sequences, dtype, device, **options)

    mixed = ((1, 13), (7, 7), (3, 17), (1, 1))
    yield make("no_sequences", ())
    yield make("one_token_ever", ((1, 1),))
    yield make("decode", ((1, 17),))
    yield make("decode_block_end", ((1, 16),))
    yield make("decode_batch", ((1, 3), (1, 29), (1, 8), (1, 1)))
    yield make("decode_batch_adjacent", ((1, 3), (1, 29), (1, 8)), adjacent=True)
    yield make("prefill", ((13, 13),))
    yield make("prefill_batch_adjacent", ((5, 5), (1, 1), (16, 16)), adjacent=True)
    yield make("chunk_after_context", ((17, 22),))
    yield make("mixed", mixed)
    yield make("mixed_with_empty_sequences", ((0, 0), (1, 9), (0, 0), (4, 4), (0, 0)))
    yield make("padding_tokens", ((1, 9), (3, 3)), padding=4)
    yield make("only_padding", ((0, 0),), padding=3)
    yield make("block_of_1", mixed, block_size=1)
    yield make("rank_512_rope_64_block_16", mixed, rank=512, rope=64, heads=5, block_size=16)
    yield make("odd_sizes_one_head", ((3, 3), (1, 10)), rank=17, rope=6, heads=1)
    yield make("scale_not_from_sizes", mixed, scale=0.75)
    yield make("bidirectional", mixed, causal=False)
    yield make("tokens_first_layout", mixed, tokens_first=True)


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """One call with a problem's shapes: few tokens decode, more are a prompt."""

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    decode = tokens <= MOST_DECODING
    sample = latent_call(
        "problem",
        [(1, CONTEXT)] * tokens if decode else [(tokens, tokens)],
        dtype,
        device,
        heads=size("heads", 16),
        rank=size("rank", 512),
        rope=size("rope", 64),
        block_size=size("block_size", 16),
        causal=bool(problem.fact("causal", True)),
    )
    return dict(sample.kwargs)


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return max(int(kwargs["q"].shape[2]), max(kwargs["kv_lengths"].tolist(), default=0))


OP = Op(
    name="latent_attention",
    schema=(
        "(Tensor q, Tensor cache, Tensor block_tables, Tensor query_starts, Tensor kv_lengths, "
        "int rank, float scale, bool causal, SymInt max_query, SymInt max_kv) -> (Tensor, Tensor)"
    ),
    keys=frozenset({"heads", "rank", "rope", "causal", "block_size"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    tokens=len,
    inputs=_problem_call,
    results=("input", "float32"),
    source="https://arxiv.org/abs/2405.04434",
)
