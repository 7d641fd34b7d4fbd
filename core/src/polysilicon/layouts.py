"""A small layout algebra: how the dims of a tensor are padded, tiled and ordered in memory.

A layout is written as its physical dims, outermost first. For a weight `N, K` in tiles of 64 × 32:
`("N/64", "K/32", "64", "32")`, the classic tile-major form, is `Tiled(dims=("N", "K"),
tiles={"N": 64, "K": 32})`. Plain is a layout without tiles; padded is one whose order stays plain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from polysilicon.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Padding:
    """What a layout costs in memory for one shape."""

    logical: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements that hold no data."""
        return _product(self.padded) - _product(self.logical)

    @property
    def overhead(self) -> float:
        """Physical ÷ logical size; 1.0 means nothing is wasted. An empty tensor wastes nothing."""
        return _product(self.padded) / _product(self.logical) if _product(self.logical) else 1.0


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """A tensor whose dims are padded to multiples and split into tiles.

    Attributes:
        dims: names of the logical dims, outermost first.
        tiles: dim → tile size; the dim is padded to a multiple of it.
        order: physical order of the outer dims; empty means the logical order.
        inner: order of the dims inside one tile; empty means `order`'s, among tiled dims.
        blocked: True puts whole tiles together (`N/64 K/32 64 32`); False only pads.
        fill: what padding holds. Zero keeps sums right.

    Example:
        >>> import torch
        >>> layout = Tiled(dims=("N", "K"), tiles={"N": 2, "K": 4})
        >>> layout.pack(torch.ones(3, 5)).shape
        torch.Size([2, 2, 2, 4])
        >>> layout.padding((3, 5)).elements
        17
    """

    dims: tuple[str, ...]
    tiles: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    blocked: bool = True
    fill: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", MappingProxyType(dict(self.tiles)))
        object.__setattr__(self, "order", self.order or self.dims)
        tiled = tuple(dim for dim in self.order if dim in self.tiles)
        object.__setattr__(self, "inner", self.inner or tiled)
        if len(set(self.dims)) != len(self.dims) or sorted(self.order) != sorted(self.dims):
            raise RecordError(
                f"layout dims {self.dims} in order {self.order}: expected each dim once in both"
            )
        if unknown := sorted(set(self.tiles) - set(self.dims)):
            raise RecordError(f"layout tiles {unknown} are no dims of it: the dims are {self.dims}")
        if sorted(self.inner) != sorted(tiled):
            raise RecordError(
                f"layout inner order {self.inner}: expected each tiled dim of {tiled} once"
            )
        if wrong := {dim: size for dim, size in self.tiles.items() if size < 1}:
            raise RecordError(f"layout tile sizes {wrong}: expected 1 or more")

    @property
    def physical_dims(self) -> tuple[str, ...]:
        """The dims in memory, as in `Layout.dims`: `("N/64", "K/32", "64", "32")`."""
        if not self.blocked:
            return self.order
        outer = tuple(
            f"{dim}/{self.tiles[dim]}" if dim in self.tiles else dim for dim in self.order
        )
        return (*outer, *(str(self.tiles[dim]) for dim in self.inner))

    def padding(self, shape: Sequence[int]) -> Padding:
        """What this layout adds to a tensor of `shape`."""
        self._check(shape)
        padded = (-(-size // t) * t for size, t in zip(shape, self._sizes(), strict=True))
        return Padding(logical=tuple(shape), padded=tuple(padded))

    def physical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that `pack` returns for a tensor of `shape`."""
        padded = dict(zip(self.dims, self.padding(shape).padded, strict=True))
        if not self.blocked:
            return tuple(padded[dim] for dim in self.order)
        outer = (padded[dim] // self.tiles.get(dim, 1) for dim in self.order)
        return (*outer, *(self.tiles[dim] for dim in self.inner))

    def pack(self, logical: Tensor) -> Tensor:
        """The physical tensor, contiguous; always a copy where anything moves."""
        shape = tuple(logical.shape)
        padding = self.padding(shape)
        padded = logical
        if padding.padded != shape:
            padded = logical.new_full(padding.padded, self.fill)
            padded[tuple(slice(size) for size in shape)] = logical
        if not self.blocked:
            return padded.permute([self.dims.index(dim) for dim in self.order]).contiguous()
        return padded.reshape(self._split(padding.padded)).permute(self._axes()).contiguous()

    def unpack(self, physical: Tensor, shape: Sequence[int]) -> Tensor:
        """The logical tensor of `shape` that `pack` was given.

        Raises:
            ValueError: the physical shape isn't what `pack` makes of `shape`.
        """
        if tuple(physical.shape) != self.physical_shape(shape):
            raise ValueError(
                f"unpack got shape {tuple(physical.shape)}: expected {self.physical_shape(shape)} "
                f"({' '.join(self.physical_dims)}) for a logical {tuple(shape)}"
            )
        padded = self.padding(shape).padded
        axes = self._axes() if self.blocked else [self.dims.index(dim) for dim in self.order]
        back = [axes.index(axis) for axis in range(len(axes))]
        whole = physical.permute(back).reshape(padded)
        return whole[tuple(slice(size) for size in shape)].contiguous()

    def _sizes(self) -> list[int]:
        return [self.tiles.get(dim, 1) for dim in self.dims]

    def _split(self, padded: Sequence[int]) -> list[int]:
        """Each logical dim as (number of tiles, tile), an untiled one as (size,)."""
        sizes: list[int] = []
        for dim, size in zip(self.dims, padded, strict=True):
            sizes += [size // self.tiles[dim], self.tiles[dim]] if dim in self.tiles else [size]
        return sizes

    def _axes(self) -> list[int]:
        """The permutation from `_split`'s axes to the physical order."""
        outer: dict[str, int] = {}
        axis = 0
        for dim in self.dims:
            outer[dim] = axis
            axis += 2 if dim in self.tiles else 1
        return [outer[dim] for dim in self.order] + [outer[dim] + 1 for dim in self.inner]

    def _check(self, shape: Sequence[int]) -> None:
        if len(shape) != len(self.dims):
            raise ValueError(f"layout of dims {self.dims} got shape {tuple(shape)}: one size a dim")


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
