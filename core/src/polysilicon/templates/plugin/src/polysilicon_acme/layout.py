"""How tensors lie in the memory of Acme chips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Layout, Tiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: The tiles that the matrix unit reads, each in one burst: outputs by inputs.
TILES = Tiled(dims=("N", "K"), tiles={"N": 64, "K": 32})

LAYOUTS = (
    Layout(
        name="acme.tiles",
        role="linear_weight",
        dims=TILES.physical_dims,
        pack="polysilicon_acme.layout:pack",
        unpack="polysilicon_acme.layout:unpack",
    ),
)


def pack(weight: Tensor) -> Tensor:
    """[N, K] → `TILES.physical_dims`; what a tile has beyond the weight is zero."""
    return TILES.pack(weight)


def unpack(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the weight of `shape` [N, K], bit for bit."""
    return TILES.unpack(tiles, shape)
