"""What the conformance suite can't know of the layout: where an element lies."""

from __future__ import annotations

import torch

from polysilicon_acme.layout import pack, unpack


def test_element_lies_in_its_tile() -> None:
    weight = torch.arange(130 * 70).view(130, 70)
    tiles = pack(weight)
    assert tiles.shape == (3, 3, 64, 32)
    assert tiles[1, 2, 5, 3] == weight[64 + 5, 64 + 3]


def test_unpacking_gives_back_every_bit() -> None:
    weight = torch.randn(65, 33).to(torch.bfloat16)
    assert torch.equal(unpack(pack(weight), weight.shape), weight)
