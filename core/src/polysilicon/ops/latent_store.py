"""Writing this call's compressed latents and shared rotary keys into a paged cache.

T tokens; a slot holds what multi-head latent attention keeps of a token: its latent, then the
rotated part of its key, which all heads share. The cache's strides are the layout's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.kv_store import slots_are_rows
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.records import Problem


def reference(
    latent: Tensor,  # [T, rank]
    rotary: Tensor,  # [T, rope]
    cache: Tensor,  # [blocks, block_size, rank + rope]
    slots: Tensor,  # int64 [T]: block * block_size + offset; -1: not stored
) -> None:
    """The definition, one token at a time; a store is exact in every dtype."""
    block_size, rank = cache.shape[1], latent.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = cache[slot // block_size, slot % block_size]
            row[:rank], row[rank:] = latent[token], rotary[token]


def torch_kernel(latent: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Stores by one indexed copy of whole rows."""
    rows = torch.cat((latent, rotary), 1)
    if slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().view(-1)
        rows, slots = rows[kept], slots[kept]
    if slots_are_rows(cache):
        cache.view(-1, cache.shape[2]).index_copy_(0, slots, rows)
        return
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = rows


def latent_store_fake(latent: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Shape function: nothing is returned."""


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    def make(name: str, slots: list[int], rank: int = 16, rope: int = 8, size: int = 4) -> Sample:
        rng = torch.Generator().manual_seed(sum(map(ord, name)))
        blocks = max([*slots, 0]) // size + 2

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(device, dtype)

        # Both are slices of one projection's rows: the kernel must honour strides.
        projected = normal(len(slots), rank + rope)
        return Sample(
            name=name,
            kwargs={
                "latent": projected[:, :rank],
                "rotary": projected[:, rank:],
                "cache": normal(blocks, size, rank + rope),
                "slots": torch.tensor(slots, dtype=torch.int64, device=device),
            },
        )

    yield make("no_tokens", [])
    yield make("one_token", [5])
    yield make("one_block", [8, 9, 10, 11])
    yield make("one_more_than_a_block", [4, 5, 6, 7, 8])
    yield make("shuffled_blocks", [14, 15, 4, 5, 22, 23, 0])
    yield make("padding_last", [3, 4, -1, -1])
    yield make("padding_between", [-1, 3, -1, 9, 2])
    yield make("only_padding", [-1, -1, -1])
    yield make("rank_512_rope_64", [1, 2, 3], rank=512, rope=64)
    yield make("odd_sizes", [6, 1, 7], rank=17, rope=6)
    yield make("block_of_1", [2, 0, 1], size=1)
    yield make("block_of_16_prime_tokens", list(range(13, 44)), size=16)
    tokens_first = make("tokens_first_layout", [14, 15, 4, 5, -1, 0])
    cache = tokens_first.kwargs["cache"].transpose(0, 1).contiguous().transpose(0, 1)
    yield Sample(name=tokens_first.name, kwargs={**tokens_first.kwargs, "cache": cache})


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A call with a problem's shapes: the tokens scattered over a cache of twice their number."""

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    rank, rope, block_size = size("rank", 512), size("rope", 64), size("block_size", 16)
    blocks = -(-2 * tokens // block_size)
    source = Source(dtype, device)
    shuffled = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))
    return {
        "latent": source.normal(tokens, rank),
        "rotary": source.normal(tokens, rope),
        "cache": source.normal(blocks, block_size, rank + rope),
        "slots": shuffled[:tokens].to(device),
    }


OP = Op(
    name="latent_store",
    schema="(Tensor latent, Tensor rotary, Tensor(a!) cache, Tensor slots) -> ()",
    keys=frozenset({"rank", "rope", "block_size"}),
    reference=reference,
    samples=_samples,
    mutates=("cache",),
    tokens=len,
    inputs=_problem_call,
    source="https://arxiv.org/abs/2405.04434",
)
