"""The layouts that core is offered, by the current rules; `sticks` has the rules themselves."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from polysilicon.api import Layout
from polysilicon_spyre.chips import STICK_BYTES
from polysilicon_spyre.formats import dtype_name
from polysilicon_spyre.sticks import Rules, StickLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: Of the two versions that `sticks` knows.
CURRENT: Rules = "2026-09"

#: nn.Linear's weight [N, K]: sticks along N, so that a product over K needs no relayout.
WEIGHT_ORDER = (1, 0)
#: Pages [blocks, tokens, heads, head size]: the tokens of a block and head are adjacent sticks.
PAGE_ORDER = (1, 0, 2, 3)
#: Tokens of a block: what the card's attention rounds to.
BLOCK_TOKENS = 64

_HERE = "polysilicon_spyre.layout"
_FACTS = {"rules": CURRENT, "stick_bytes": STICK_BYTES}

LAYOUTS = (
    Layout(
        name="spyre.weight_sticks",
        role="linear_weight",
        dims=("N/stick", "K", "stick"),
        pack=f"{_HERE}:pack_weight",
        unpack=f"{_HERE}:unpack_weight",
        facts=_FACTS,
    ),
    Layout(
        name="spyre.activation_sticks",
        role="activation",
        dims=("hidden/stick", "tokens", "stick"),
        pack=f"{_HERE}:pack_rows",
        unpack=f"{_HERE}:unpack_rows",
        facts=_FACTS,
    ),
    Layout(
        name="spyre.embedding_sticks",
        role="embedding",
        dims=("hidden/stick", "vocabulary", "stick"),
        pack=f"{_HERE}:pack_rows",
        unpack=f"{_HERE}:unpack_rows",
        facts=_FACTS,
    ),
    Layout(
        name="spyre.kv_pages",
        role="kv_block",
        dims=("blocks", "heads", "tokens", "head_size"),
        facts={"block_size": BLOCK_TOKENS},
    ),
    # The same pages in sticks, for a kernel that asks for them by name.
    Layout(
        name="spyre.kv_sticks",
        role="kv_block",
        dims=("blocks", "heads", "head_size/stick", "tokens", "stick"),
        pack=f"{_HERE}:pack_pages",
        unpack=f"{_HERE}:unpack_pages",
        facts={**_FACTS, "block_size": BLOCK_TOKENS},
    ),
)


@functools.lru_cache(maxsize=4096)
def layout_of(
    size: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None
) -> StickLayout:
    """The layout of a contiguous tensor by the current rules, remembered."""
    return StickLayout.of(size, dtype, rules=CURRENT, dim_order=order)


def pack_weight(weight: Tensor) -> Tensor:
    """[N, K] → [N/stick, K, stick]; sticks beyond N hold zeros."""
    return layout_of(tuple(weight.shape), dtype_name(weight), WEIGHT_ORDER).pack(weight)


def unpack_weight(image: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the weight of `shape` [N, K], bit for bit."""
    return layout_of(tuple(shape), dtype_name(image), WEIGHT_ORDER).unpack(image)


def pack_rows(rows: Tensor) -> Tensor:
    """[rows, hidden] → [hidden/stick, rows, stick]; sticks beyond hidden hold zeros."""
    return layout_of(tuple(rows.shape), dtype_name(rows)).pack(rows)


def unpack_rows(image: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the tensor of `shape`, bit for bit."""
    return layout_of(tuple(shape), dtype_name(image)).unpack(image)


def pack_pages(pages: Tensor) -> Tensor:
    """[blocks, tokens, heads, head size] → [blocks, heads, head size/stick, tokens, stick]."""
    return layout_of(tuple(pages.shape), dtype_name(pages), PAGE_ORDER).pack(pages)


def unpack_pages(image: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the cache of `shape`, bit for bit."""
    return layout_of(tuple(shape), dtype_name(image), PAGE_ORDER).unpack(image)


def wide_vector(vector: Tensor, tiles: int, stick: int) -> Tensor:
    """[tiles, stick] in float32 of a bias or norm weight, beside what lies in sticks of `stick`.

    Its own sticks may be of another width. Padding is NaN: who reads it, shows it.
    """
    import torch

    wide = vector.new_full((tiles * stick,), float("nan"), dtype=torch.float32)
    wide[: vector.shape[0]] = vector
    return wide.view(tiles, stick)
