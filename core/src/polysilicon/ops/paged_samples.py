"""Calls of paged attention that kernels are judged on: caches poisoned, tables shuffled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.ops.contract import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from polysilicon.records import Problem


def paged_call(
    name: str,
    sequences: Sequence[tuple[int, int]],  # (new tokens, tokens in the cache with them)
    dtype: torch.dtype,
    device: torch.device,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    value_size: int | None = None,
    block_size: int = 4,
    padding: int = 0,
    adjacent: bool = False,
    sinks: bool = False,
    head_major: bool = False,
    **settings: Any,
) -> Sample:
    """A call whose unused slots hold NaN: a kernel that reads one shows it."""
    rng = torch.Generator().manual_seed(sum(map(ord, name)))
    value_size = size if value_size is None else value_size
    needed = [-(-length // block_size) for _, length in sequences]
    blocks = sum(needed) + 3
    order = torch.arange(blocks) if adjacent else torch.randperm(blocks, generator=rng)
    tables = torch.full((len(sequences), max([*needed, 1])), blocks - 1, dtype=torch.int32)
    filled = torch.zeros(blocks, block_size, dtype=torch.bool)
    used = 0
    for row, (_, length) in enumerate(sequences):
        own = order[used : used + needed[row]]
        tables[row, : needed[row]] = own
        filled[own] = (torch.arange(needed[row] * block_size) < length).view(-1, block_size)
        used += needed[row]
    shape = (blocks, block_size, kv_heads)
    k_cache = torch.randn(*shape, size, generator=rng)
    v_cache = torch.randn(*shape, value_size, generator=rng)
    k_cache[~filled], v_cache[~filled] = math.nan, math.nan
    starts = torch.tensor([0, *(new for new, _ in sequences)]).cumsum(0)
    q = torch.randn(int(starts[-1]) + padding, heads, size, generator=rng)
    lengths = [length for _, length in sequences]

    def place(cache: Tensor) -> Tensor:
        cache = cache.to(device, dtype)
        return cache.transpose(1, 2).contiguous().transpose(1, 2) if head_major else cache

    values = {
        "q": q.to(device, dtype),
        "k_cache": place(k_cache),
        "v_cache": place(v_cache),
        "block_tables": tables.to(device),
        "query_starts": starts.to(device, torch.int32),
        "kv_lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
        "scale": size**-0.5,
        "window": 0,
        "softcap": 0.0,
        "sinks": torch.randn(heads, generator=rng).to(device, dtype) if sinks else None,
        "causal": True,
        "max_query": max([1, *(new for new, _ in sequences)]),
        "max_kv": max([1, *lengths]),
    }
    return Sample(name=name, kwargs=values | settings)


def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Sizes 0, 1, prime and one off a block (of 4); every option alone and together."""

    def make(name: str, sequences: Sequence[tuple[int, int]], **options: Any) -> Sample:
        return paged_call(name, sequences, dtype, device, **options)

    mixed = ((1, 13), (7, 7), (3, 17), (1, 1))
    yield make("no_sequences", ())
    yield make("one_token_ever", ((1, 1),))
    yield make("decode", ((1, 17),))
    yield make("decode_block_end", ((1, 16),))
    yield make("decode_batch", ((1, 3), (1, 29), (1, 8), (1, 1)))
    yield make("decode_batch_adjacent", ((1, 3), (1, 29), (1, 8)), adjacent=True)
    yield make("prefill", ((13, 13),))
    yield make("prefill_adjacent", ((16, 16),), adjacent=True)
    yield make("prefill_batch", ((5, 5), (1, 1), (11, 11)))
    yield make("chunk_after_context", ((5, 22),))
    yield make("mixed", mixed)
    yield make("mixed_with_empty_sequences", ((0, 0), (1, 9), (0, 0), (4, 4), (0, 0)))
    yield make("padding_tokens", ((1, 9), (3, 3)), padding=4)
    yield make("only_padding", ((0, 0),), padding=3)
    yield make("mha_block_1", mixed, heads=3, kv_heads=3, block_size=1)
    yield make("mqa_head_80_block_16", mixed, heads=5, kv_heads=1, size=80, block_size=16)
    yield make("head_96", ((2, 9), (1, 6)), size=96)
    yield make("value_head_smaller", mixed, value_size=8)
    yield make("value_head_larger_odd", ((3, 3), (1, 10)), size=24, value_size=17)
    yield make("window_1", mixed, window=1)
    yield make("window_3", mixed, window=3)
    yield make("window_3_adjacent", mixed, window=3, adjacent=True)
    yield make("window_wider_than_context", mixed, window=100)
    yield make("window_equal_to_prefill", ((7, 7), (1, 7)), window=7)
    yield make("softcap", mixed, softcap=2.0, scale=1.0)
    yield make("sinks", mixed, sinks=True)
    yield make("sinks_and_padding", ((1, 5), (2, 2)), sinks=True, padding=3)
    yield make("softcap_sinks_window", mixed, softcap=5.0, sinks=True, window=5)
    yield make("scale_not_from_head", mixed, scale=0.75)
    yield make("bidirectional", mixed, causal=False)
    yield make("bidirectional_window", mixed, causal=False, window=3)
    yield make("head_major_layout", mixed, head_major=True)


#: Context of the decoding sequences in `problem_call`, in tokens: past every small-case path.
CONTEXT = 1000
#: Up to so many tokens `problem_call` decodes one a sequence, above it prefills one sequence.
MOST_DECODING = 64


def problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """One call with a problem's shapes."""

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    heads, head_size = size("heads", 8), size("head_size", 64)
    decode = tokens <= MOST_DECODING
    sample = paged_call(
        "problem",
        [(1, CONTEXT)] * tokens if decode else [(tokens, tokens)],
        dtype,
        device,
        heads=heads,
        kv_heads=size("kv_heads", heads),
        size=head_size,
        value_size=size("v_head_size", head_size),
        block_size=size("block_size", 16),
        sinks=bool(problem.fact("sinks")),
        window=size("window", 0),
        # The problem says whether there is a softcap, not which: Gemma 2's.
        softcap=50.0 if problem.fact("softcap") else 0.0,
        causal=bool(problem.fact("causal", True)),
    )
    return dict(sample.kwargs)
