"""Writing this call's keys and values into the blocks of a paged cache.

T tokens, hk key heads, d and dv head sizes. Both caches have the logical dims
[blocks, block_size, hk, d]; their strides are the layout's business, so kernels must honour them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.records import Problem


def reference(
    k: Tensor,  # [T, hk, d]
    v: Tensor,  # [T, hk, dv]
    k_cache: Tensor,  # [blocks, block_size, hk, d]
    v_cache: Tensor,  # [blocks, block_size, hk, dv]
    slots: Tensor,  # int64 [T]: block * block_size + offset; -1: not stored
) -> None:
    """The definition, one token at a time; a store is exact in every dtype."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]


def torch_kernel(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stores by one indexed copy a cache."""
    if slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().view(-1)
        k, v, slots = k[kept], v[kept], slots[kept]
    _store(k, k_cache, slots)
    _store(v, v_cache, slots)


def _store(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    if slots_are_rows(cache):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
        return
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = values


def slots_are_rows(cache: Tensor) -> bool:
    """Whether the cache can be viewed as [slots, hk, d], the slots at one stride."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def kv_store_fake(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Shape function: nothing is returned."""


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    def make(
        name: str, slots: list[int], hk: int = 2, d: int = 16, dv: int | None = None, size: int = 4
    ) -> Sample:
        rng = torch.Generator().manual_seed(len(name))
        value_size = d if dv is None else dv
        blocks = max([*slots, 0]) // size + 2

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(device, dtype)

        # Projections arrive head-major: the kernel must honour strides.
        return Sample(
            name=name,
            kwargs={
                "k": normal(hk, len(slots), d).transpose(0, 1),
                "v": normal(len(slots), hk, value_size),
                "k_cache": normal(blocks, size, hk, d),
                "v_cache": normal(blocks, size, hk, value_size),
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
    yield make("one_head_80", [1, 2, 3], hk=1, d=80)
    yield make("value_head_differs", [6, 1, 7], d=24, dv=17)
    yield make("block_of_1", [2, 0, 1], size=1)
    yield make("block_of_16_prime_tokens", list(range(13, 44)), size=16)
    head_major = make("head_major_layout", [14, 15, 4, 5, -1, 0])
    inner = {
        name: head_major.kwargs[name].transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("k_cache", "v_cache")
    }
    yield Sample(name=head_major.name, kwargs={**head_major.kwargs, **inner})


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A call with a problem's shapes: the tokens scattered over a cache of twice their number."""

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    heads, head_size, block_size = (
        size("kv_heads", 8),
        size("head_size", 64),
        size("block_size", 16),
    )
    sizes = (head_size, size("v_head_size", head_size))
    blocks = -(-2 * tokens // block_size)
    source = Source(dtype, device)
    shuffled = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))
    return {
        "k": source.normal(tokens, heads, sizes[0]),
        "v": source.normal(tokens, heads, sizes[1]),
        "k_cache": source.normal(blocks, block_size, heads, sizes[0]),
        "v_cache": source.normal(blocks, block_size, heads, sizes[1]),
        "slots": shuffled[:tokens].to(device),
    }


OP = Op(
    name="kv_store",
    schema=("(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()"),
    keys=frozenset({"kv_heads", "head_size", "v_head_size", "block_size"}),
    reference=reference,
    samples=_samples,
    mutates=("k_cache", "v_cache"),
    tokens=len,
    inputs=_problem_call,
    source="https://arxiv.org/abs/2309.06180",
)
