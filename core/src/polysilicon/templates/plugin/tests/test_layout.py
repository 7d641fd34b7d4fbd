"""What the conformance suite can't know of the layout: where an element lies."""

from __future__ import annotations

import torch

from polysilicon_acme.layout import TILES, pack, unpack

#: Two whole tiles and a bit in each dim, and the last element's place.
SHAPE = tuple(2 * TILES.tiles.get(dim, 1) + 1 for dim in TILES.dims)
LAST = {dim: size - 1 for dim, size in zip(TILES.dims, SHAPE, strict=True)}


def test_element_lies_in_its_tile() -> None:
    weight = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    outer = [LAST[dim] // TILES.tiles.get(dim, 1) for dim in TILES.order]
    inner = [LAST[dim] % TILES.tiles[dim] for dim in TILES.inner]
    assert pack(weight)[(*outer, *inner)] == weight[-1, -1]


def test_unpacking_gives_back_every_bit() -> None:
    weight = torch.randn(SHAPE).to(torch.bfloat16)
    assert torch.equal(unpack(pack(weight), weight.shape), weight)
