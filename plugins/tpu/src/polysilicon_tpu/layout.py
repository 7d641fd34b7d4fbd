"""How tensors lie in a TPU's memory: the tiling that the compiler (XLA) gives every array.

The last two dims in memory are cut into tiles of rows × 128 lanes, and elements narrower than 32
bits of neighbouring rows share a 32-bit word. What doesn't fill a tile is padding that costs real
memory: a bfloat16 [1, 4096] takes twice its size. The rule was measured from the compiler, by
which `tests/aot` checks it for v4 to v7x; how XLA writes and orders tiles is specified in
https://openxla.org/xla/tiled_layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from polysilicon.api import Layout
from polysilicon_tpu.chips import LANES, SUBLANES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

#: torch dtype → XLA's name and bits, for the dtypes that a TPU stores as they are. The 64-bit ones
#: become 32-bit or pairs on the way to a TPU, and are none of ours.
ELEMENTS = {
    "float32": ("f32", 32),
    "int32": ("s32", 32),
    "bfloat16": ("bf16", 16),
    "float16": ("f16", 16),
    "int16": ("s16", 16),
    "int8": ("s8", 8),
    "uint8": ("u8", 8),
    "float8_e4m3fn": ("f8e4m3fn", 8),
    "float8_e5m2": ("f8e5m2", 8),
    "int4": ("s4", 4),
}
_WORD_BITS = 32


def element(dtype: object) -> tuple[str, int]:
    """XLA's name and the bits of a torch dtype, or of its name; `int4` has only a name.

    Raises:
        ValueError: a TPU doesn't store that dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENTS:
        raise ValueError(
            f"a TPU does not store {name}: cast to one of {', '.join(ELEMENTS)} before"
        )
    return ELEMENTS[name]


@dataclass(frozen=True, kw_only=True)
class TpuTiling:
    """How the compiler lays out one shape in one dtype, on v4 to v7x alike.

    Attributes:
        shape: the logical shape, one dim or more.
        dtype: torch's name of the dtype, or `int4`.
        order: the dims from outermost to innermost; empty means what the compiler takes for an
            argument: the order that pads least. A Pallas kernel wants the dims as they are.

    Example:
        >>> tiling = TpuTiling(shape=(17, 130), dtype="bfloat16")
        >>> tiling.describe(), tiling.padded_shape, round(tiling.waste, 1)
        ('bf16[17,130]{1,0:T(8,128)(2,1)}', (24, 256), 2.8)
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        element(self.dtype)
        if not self.shape or min(self.shape) < 0:
            raise ValueError(f"shape {self.shape}: expected one dim or more, none negative")
        if not self.order:
            object.__setattr__(self, "order", self._least_padded())
        if sorted(self.order) != list(range(len(self.shape))):
            raise ValueError(f"order {self.order} of shape {self.shape}: expected each dim once")

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return element(self.dtype)[1]

    @property
    def packing(self) -> int:
        """Elements that share one 32-bit word: neighbours along the second-innermost dim."""
        return _WORD_BITS // self.bits

    @cached_property
    def tile(self) -> int:
        """Rows of a tile; for one dim, the elements of a tile."""
        if len(self.shape) == 1:
            return self._flat_tile(self.shape[0])
        return self._row_tile(self.shape[self.order[-2]])

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The logical dims, padded to whole tiles."""
        padded = list(self.shape)
        if len(padded) == 1:
            return (_up(padded[0], self.tile),)
        rows, lanes = self.order[-2], self.order[-1]
        padded[rows], padded[lanes] = _up(padded[rows], self.tile), _up(padded[lanes], LANES)
        return tuple(padded)

    @property
    def logical_bytes(self) -> int:
        """What the elements alone would take."""
        return -(-math.prod(self.shape) * self.bits // 8)

    @property
    def padded_bytes(self) -> int:
        """What it takes in a TPU's memory."""
        return math.prod(self.padded_shape) * self.bits // 8

    @property
    def waste(self) -> float:
        """Padded ÷ logical bytes; 1.0 means nothing is wasted. An empty tensor wastes nothing."""
        return self.padded_bytes / self.logical_bytes if self.logical_bytes else 1.0

    def describe(self) -> str:
        """The layout in XLA's notation, as it stands in a compiled program."""
        name, sizes = element(self.dtype)[0], ",".join(map(str, self.shape))
        minor_first = ",".join(map(str, reversed(self.order)))
        tiles = self._tiles_written() + ("E(4)" if self.bits == 4 else "")
        return f"{name}[{sizes}]{{{minor_first}{':' + tiles if tiles else ''}}}"

    def pack(self, logical: Tensor) -> Tensor:
        """The tensor as its bytes lie in memory, padding zero: [outer …, tiles of rows, tiles of
        lanes, words of a column, 128, elements of a word].

        Raises:
            ValueError: shape or dtype aren't this tiling's, or it is 4-bit, which torch has not.
        """
        self._check(logical)
        from torch.nn.functional import pad

        padded = logical if len(self.shape) == 1 else logical.permute(self.order)
        room = [b - a for a, b in zip(padded.shape, self._ordered(self.padded_shape), strict=True)]
        if any(room):
            # pad() takes the last dim first, and does not know 8-bit floats: their bits are ints.
            widths = [n for size in reversed(room) for n in (0, size)]
            padded = pad(_as_bits(padded), widths).view(logical.dtype)
        split = padded.reshape(self._split)
        outer = split.dim() - 5
        axes = [*range(outer), outer, outer + 3, outer + 1, outer + 4, outer + 2]
        return _dense(split.permute(axes))

    def unpack(self, physical: Tensor) -> Tensor:
        """The logical tensor, bit for bit.

        Raises:
            ValueError: it isn't what `pack` makes of this shape and dtype.
        """
        if tuple(physical.shape) != self.physical_shape:
            raise ValueError(
                f"unpack got shape {tuple(physical.shape)}: expected {self.physical_shape} for "
                f"{self.describe()}"
            )
        outer = physical.dim() - 5
        axes = [*range(outer), outer, outer + 2, outer + 4, outer + 1, outer + 3]
        padded = physical.permute(axes).reshape(self._ordered(self.padded_shape))
        whole = padded[tuple(slice(size) for size in self._ordered(self.shape))]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return _dense(whole.permute(back))

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape that `pack` returns."""
        *outer, tiles, words, packed, columns, lanes = self._split
        return (*outer, tiles, columns, words, lanes, packed)

    @property
    def _split(self) -> tuple[int, ...]:
        """Padded dims in order, rows as (tiles, words, elements of a word), lanes as (tiles, 128).

        One dim counts as one column of 128 lanes whose rows follow each other.
        """
        sizes, tile = self._ordered(self.padded_shape), self.tile
        if len(sizes) == 1:
            sizes, tile = (sizes[0] // LANES, LANES), tile // LANES
        *outer, rows, lanes = sizes
        words = (rows // tile, tile // self.packing, self.packing)
        return (*outer, *words, lanes // LANES, LANES)

    def _ordered(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in self.order)

    def _check(self, logical: Tensor) -> None:
        if self.bits < 8:
            raise ValueError(f"{self.dtype} has no torch tensors: only its sizes are known here")
        came = (tuple(logical.shape), str(logical.dtype).removeprefix("torch."))
        if came != (self.shape, self.dtype):
            raise ValueError(f"pack got {came[1]} {came[0]}: expected {self.dtype} {self.shape}")

    def _tiles_written(self) -> str:
        if not math.prod(self.shape):
            return ""  # the compiler gives an empty array no tiles
        packed = f"({self.packing},1)" if self.packing > 1 else ""
        if len(self.shape) == 1:
            return f"T({self.tile})" + (f"({LANES}){packed}" if packed else "")
        return f"T({self.tile},{LANES}){packed}"

    def _row_tile(self, rows: int) -> int:
        whole = SUBLANES * self.packing
        if self.bits <= 8 and rows and rows % whole == 0:
            return whole
        return min(SUBLANES, max(self.packing, _power_of_two(rows)))

    def _flat_tile(self, size: int) -> int:
        return min(SUBLANES * LANES, max(LANES * self.packing, _power_of_two(size)))

    def _least_padded(self) -> tuple[int, ...]:
        """The order that the compiler takes: the rows and lanes that pad least go innermost.

        Among equals the dims stay as they are.
        """
        rank = len(self.shape)
        if rank == 1 or not math.prod(self.shape):
            return tuple(range(rank))
        total = math.prod(self.shape)

        def cost(pair: tuple[int, int]) -> tuple[int, int, int]:
            rows, lanes = pair
            rest = total // (self.shape[rows] * self.shape[lanes])
            row_bytes = _up(self.shape[rows], self._row_tile(self.shape[rows]))
            return rest * row_bytes * _up(self.shape[lanes], LANES), -lanes, -rows

        pairs = ((r, lane) for r in range(rank) for lane in range(rank) if r != lane)
        rows, lanes = min(pairs, key=cost)
        return (*(dim for dim in range(rank) if dim not in (rows, lanes)), rows, lanes)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def _as_bits(x: Tensor) -> Tensor:
    import torch

    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _dense(x: Tensor) -> Tensor:
    """A tensor of its own memory. contiguous() would hand the caller's on where nothing moves."""
    import torch

    return x.clone(memory_format=torch.contiguous_format)


# --- what a whole model pays -----------------------------------------------------------------


def padding_report(tensors: Iterable[tuple[str, Sequence[int], object]]) -> str:
    """What padding costs, one line a tensor, the most wasted bytes first, then the sum.

    Args:
        tensors: name, shape and dtype of each, e.g. of a model's parameters.
    """
    rows = [(n, TpuTiling(shape=tuple(s), dtype=_name(d))) for n, s, d in tensors]
    rows.sort(key=lambda row: row[1].logical_bytes - row[1].padded_bytes)
    lines = [
        f"{name}: {tiling.logical_bytes:,} bytes take {tiling.padded_bytes:,} "
        f"({tiling.waste:.2f}×) {tiling.describe()}"
        for name, tiling in rows
    ]
    logical = sum(tiling.logical_bytes for _, tiling in rows)
    padded = sum(tiling.padded_bytes for _, tiling in rows)
    factor = padded / logical if logical else 1.0
    return "\n".join([*lines, f"all: {logical:,} bytes take {padded:,} ({factor:.2f}×)"])


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# --- what core asks --------------------------------------------------------------------------


def pack(logical: Tensor) -> Tensor:
    """A tensor in the compiler's tiles, in the order of dims that the compiler takes."""
    return TpuTiling(shape=tuple(logical.shape), dtype=_name(logical.dtype)).pack(logical)


def unpack(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the tensor of `shape`, bit for bit."""
    return TpuTiling(shape=tuple(shape), dtype=_name(tiles.dtype)).unpack(tiles)


def interleave_kv(
    k: Tensor,  # [pages, page, H, D]
    v: Tensor,  # [pages, page, H, D]
) -> Tensor:
    """Keys and values of each head side by side: [pages, page, 2·H, D] as K0 V0 K1 V1 …"""
    import torch

    if k.shape != v.shape or k.dim() != 4:
        raise ValueError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)}: expected two [pages, page, H, D]"
        )
    return torch.stack((k, v), dim=3).flatten(2, 3)


def pack_pages(logical: Tensor) -> Tensor:
    """[pages, page, 2·H, D] → [pages, page, ⌈2·H/p⌉, p, D up to 128s]; padding is zero.

    Heads that share 32-bit words are neighbours in memory, so that one token's row is whole tiles
    whatever the number of heads: no copy of the cache is needed before a kernel reads it.
    """
    from torch.nn.functional import pad

    _check_pages(tuple(logical.shape))
    packing = _WORD_BITS // element(logical.dtype)[1]
    pages, page, heads, size = logical.shape
    room = [0, _up(size, LANES) - size, 0, _up(heads, packing) - heads]
    padded = pad(_as_bits(logical), room).view(logical.dtype)
    words = _up(heads, packing) // packing
    return _dense(padded.reshape(pages, page, words, packing, padded.shape[-1]))


def unpack_pages(physical: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: [pages, page, 2·H, D] of `shape`, bit for bit."""
    _check_pages(tuple(shape))
    pages, page, heads, size = shape
    packing = _WORD_BITS // element(physical.dtype)[1]
    wanted = (pages, page, _up(heads, packing) // packing, packing, _up(size, LANES))
    if tuple(physical.shape) != wanted:
        raise ValueError(f"unpack_pages got shape {tuple(physical.shape)}: expected {wanted}")
    return _dense(physical.flatten(2, 3)[:, :, :heads, :size])


def _check_pages(shape: tuple[int, ...]) -> None:
    if len(shape) != 4 or min(shape[2:]) < 1:
        raise ValueError(f"key/value pages of shape {shape}: expected [pages, page, 2·H, D]")


_TILE_DIMS = ("rows/t", "lanes/128", "t/p", "128", "p")


def _tiled(name: str, role: str, outer: tuple[str, ...] = ()) -> Layout:
    return Layout(
        name=name,
        role=role,  # type: ignore[arg-type]  # the record checks it
        dims=(*outer, *_TILE_DIMS),
        pack="polysilicon_tpu.layout:pack",
        unpack="polysilicon_tpu.layout:unpack",
        facts={"dtypes": " ".join(_PACKED)},
    )


#: The dtypes whose tensors torch can pack.
_PACKED = tuple(name for name, (_, bits) in ELEMENTS.items() if bits >= 8)

LAYOUTS = (
    _tiled("tpu.weight_tiles", "linear_weight"),
    _tiled("tpu.expert_tiles", "expert_weight", ("E",)),
    _tiled("tpu.embedding_tiles", "embedding"),
    _tiled("tpu.activation_tiles", "activation"),
    Layout(
        name="tpu.kv_heads_blocks",
        role="kv_block",
        # As paged attention in JAX takes a cache. Tokens and head size are innermost: a block of
        # 32 tokens is whole tiles in every dtype, whatever the number of heads.
        dims=("heads", "blocks", "tokens", "head_size"),
        facts={"block_size": 32},
    ),
    Layout(
        name="tpu.kv_ragged_pages",
        role="kv_block",
        # As ragged paged attention takes it: keys and values of a head side by side.
        dims=("pages", "page", "2H/p", "p", "D"),
        pack="polysilicon_tpu.layout:pack_pages",
        unpack="polysilicon_tpu.layout:unpack_pages",
        facts={"block_size": 32, "interleaved": "K0 V0 K1 V1", "dtypes": " ".join(_PACKED)},
    ),
)
