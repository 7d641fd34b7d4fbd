"""Stick layouts: how a tensor of any rank lies in Spyre's memory, in sticks of 128 bytes.

The stick is always the last device dim. A layout is defined by one identity: the host offset of an
element is the dot product of its device coordinates with `stride_map`, where -1 contributes
nothing. torch_spyre's rule for `stride_map` has changed, so a layout names its rules:

- `2026-06`: a repeated host dim goes on at its stride times the device extent before it.
- `2026-09`: that, but at most the host dim's own stride times its size; and no cap on the rank.

The default of November 2025 is public for rank 3 alone and is not offered. On a card with
torch_spyre installed, its own `SpyreTensorLayout` decides; these are the simulator's.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from polysilicon.api import LayoutError
from polysilicon_spyre.chips import ARRANGEMENTS, STICK_BYTES, STORED, Stored
from polysilicon_spyre.formats import as_bits, bits_of, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

RULES = ("2026-06", "2026-09")
Rules = Literal["2026-06", "2026-09"]
#: Highest rank that the rules of June 2026 take.
JUNE_RANK = 6
#: In a dim order and in `stride_map`: no host dim. As the last of a dim order: sparse, one
#: element a stick, which is what a reduction over the stick dim leaves.
NONE = -1


@dataclass(frozen=True, kw_only=True)
class StickLayout:
    """One tensor's place in sticks; `StickLayout.of` fills in the defaults.

    Attributes:
        size: sizes of the host tensor.
        stride: its strides, in elements.
        dim_order: host dims, the stick dim last; -1 as a last, further entry makes it sparse.
        dtype: host dtype by torch's name.
        rules: which version of the rules, see above.
        arrangement: order of the elements within sticks, see `chips.ARRANGEMENTS`.

    Example:
        >>> layout = StickLayout.of((5, 100, 150), "float16", rules="2026-09")
        >>> layout.device_size, layout.stride_map
        ((100, 3, 5, 64), (150, 64, 15000, 1))
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dim_order: tuple[int, ...]
    dtype: str
    rules: Rules
    arrangement: str = "STANDARD"

    @classmethod
    def of(
        cls,
        size: Sequence[int],
        dtype: str,
        *,
        rules: Rules,
        stride: Sequence[int] | None = None,
        dim_order: Sequence[int] | None = None,
        arrangement: str = "STANDARD",
    ) -> StickLayout:
        """The layout of a contiguous tensor in its own dim order, unless told otherwise."""
        return cls(
            size=tuple(size),
            stride=_row_major(size) if stride is None else tuple(stride),
            dim_order=tuple(range(len(size))) if dim_order is None else tuple(dim_order),
            dtype=dtype,
            rules=rules,
            arrangement=arrangement,
        )

    def __post_init__(self) -> None:
        rank = len(self.size)
        if self.dtype not in STORED:
            raise LayoutError(
                f"Spyre stores no {self.dtype}: convert to one of {', '.join(STORED)} first"
            )
        if self.rules not in RULES:
            raise LayoutError(f"layout rules {self.rules!r}: expected one of {', '.join(RULES)}")
        if self.arrangement not in ARRANGEMENTS:
            raise LayoutError(
                f"arrangement {self.arrangement!r}: expected one of {', '.join(ARRANGEMENTS)}"
            )
        if len(self.stride) != rank or min((*self.size, *self.stride), default=0) < 0:
            raise LayoutError(
                f"size {self.size} with strides {self.stride}: expected as many, none negative"
            )
        dims = self.dim_order[:-1] if self.sparse else self.dim_order
        if sorted(dims) != list(range(rank)):
            raise LayoutError(
                f"dim order {self.dim_order} of a rank-{rank} tensor: expected each dim once, "
                "and -1 after them for a sparse layout"
            )
        if self.rules == "2026-06" and rank > JUNE_RANK:
            raise LayoutError(
                f"rank {rank}: the rules of 2026-06 take at most {JUNE_RANK}; 2026-09 has no cap"
            )

    # --- what the rules say ---------------------------------------------------------------------

    @property
    def sparse(self) -> bool:
        """Whether each stick holds one element."""
        return self.dim_order[-1:] == (NONE,)

    @property
    def stored(self) -> Stored:
        """The device's format of the elements."""
        return STORED[self.dtype]

    @property
    def elems_per_stick(self) -> int:
        """Elements in one stick, in the device's format."""
        return self.stored.elems_per_stick

    @property
    def stick_dim(self) -> int:
        """The host dim that lies in sticks; -1 where there is none."""
        return self.dim_order[-1] if self.dim_order else NONE

    @property
    def host_dims(self) -> tuple[int, ...]:
        """The host dim of each device dim, -1 for none: o1 … o(n-1) as tiles, o0, the stick."""
        outer = self.dim_order[:-1]
        return (*outer[1:], self.stick_dim, *outer[:1], self.stick_dim)

    @property
    def tile_axis(self) -> int:
        """The device dim that counts sticks along the stick dim."""
        return max(len(self.dim_order) - 2, 0)

    @functools.cached_property
    def device_size(self) -> tuple[int, ...]:
        """Extents of the device dims, the stick last."""
        extents = [1 if dim == NONE else self.size[dim] for dim in self.host_dims]
        extents[self.tile_axis] = -(-extents[self.tile_axis] // self.elems_per_stick)
        extents[-1] = self.elems_per_stick
        return tuple(extents)

    @functools.cached_property
    def stride_map(self) -> tuple[int, ...]:
        """Host stride of each device dim; -1 for what contributes nothing."""
        steps: list[int] = []
        carried: dict[int, int] = {}
        for dim, extent in reversed(list(zip(self.host_dims, self.device_size, strict=True))):
            if dim == NONE or self.size[dim] == 1:
                steps.append(NONE)
                continue
            steps.append(carried.get(dim, self.stride[dim]))
            carried[dim] = steps[-1] * extent
            if self.rules == "2026-09":
                carried[dim] = min(carried[dim], self.stride[dim] * self.size[dim])
        return tuple(reversed(steps))

    @property
    def device_strides(self) -> tuple[int, ...]:
        """Strides of the device dims, in elements."""
        return _row_major(self.device_size)

    @property
    def sticks(self) -> int:
        """Sticks that the tensor takes."""
        return math.prod(self.device_size[:-1])

    @property
    def device_bytes(self) -> int:
        """Device memory that the tensor takes, padding included."""
        return STICK_BYTES * self.sticks

    @property
    def padding_bytes(self) -> int:
        """Device memory that holds no element."""
        return self.device_bytes - math.prod(self.size) * self.stored.bytes

    @property
    def waste(self) -> float:
        """Padding as a share of the device memory; an empty tensor wastes nothing."""
        return self.padding_bytes / self.device_bytes if self.device_bytes else 0.0

    # --- where an element lies ------------------------------------------------------------------

    def coordinates(self, index: Sequence[int]) -> tuple[int, ...]:
        """Device coordinates of the element at a host index."""
        self._require_standard()
        if len(index) != len(self.size) or not all(
            0 <= at < size for at, size in zip(index, self.size, strict=True)
        ):
            raise LayoutError(f"index {tuple(index)} is not in a tensor of size {self.size}")
        along = 0 if self.stick_dim == NONE else index[self.stick_dim]
        found = [0 if dim == NONE else index[dim] for dim in self.host_dims]
        found[self.tile_axis], found[-1] = divmod(along, self.elems_per_stick)
        return tuple(found)

    def holds_data(self, coordinates: Sequence[int]) -> bool:
        """Whether an element lies at device coordinates, or padding."""
        length = 1 if self.stick_dim == NONE else self.size[self.stick_dim]
        return coordinates[self.tile_axis] * self.elems_per_stick + coordinates[-1] < length

    def host_offset(self, coordinates: Sequence[int]) -> int:
        """Offset on the host, in elements, of what lies at device coordinates."""
        return sum(at * max(step, 0) for at, step in zip(coordinates, self.stride_map, strict=True))

    def address(self, index: Sequence[int]) -> int:
        """Byte offset on the device of the element at a host index."""
        found = self.coordinates(index)
        steps = zip(found, self.device_strides, strict=True)
        return self.stored.bytes * sum(at * step for at, step in steps)

    def explain(self) -> str:
        """A table: each device dim, its extent, what of the host tensor it walks, its host stride.

        The last lines say what the tensor takes, how much of it is padding, and what the format
        loses.
        """
        rows = [("device dim", "extent", "walks", "host stride")]
        for axis, (extent, step) in enumerate(zip(self.device_size, self.stride_map, strict=True)):
            rows.append((str(axis), str(extent), self._walks(axis), str(step)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        order = f"order {list(self.dim_order)}, rules {self.rules}"
        loss = f"loses {self.stored.loss}" if self.stored.loss else "loses nothing"
        return (
            f"{tuple(self.size)} {self.dtype}, {order}\n{table}\n"
            f"{self.sticks:,} sticks of {self.elems_per_stick} elements, "
            f"{self.device_bytes:,} bytes, {self.waste:.1%} of it padding\n"
            f"stored as {self.stored.name}, {loss}"
        )

    def _walks(self, axis: int) -> str:
        dim, last = self.host_dims[axis], len(self.device_size) - 1
        if axis not in (self.tile_axis, last):
            return f"dim {dim}"
        if dim == NONE:
            return "one element" if axis == last else "one stick"
        return f"dim {dim} {'mod' if axis == last else 'div'} {self.elems_per_stick}"

    def padding_mask(self, device: torch.device | str = "cpu") -> Tensor:
        """[tiles, stick] along the stick dim: True where no element lies."""
        import torch

        tiles = self.device_size[self.tile_axis]
        length = 1 if self.stick_dim == NONE else self.size[self.stick_dim]
        places = torch.arange(tiles * self.elems_per_stick, device=device)
        return (places >= length).view(tiles, self.elems_per_stick)

    # --- packing --------------------------------------------------------------------------------

    def pack(self, logical: Tensor, *, fill: float = 0.0) -> Tensor:
        """The image in sticks, of `device_size`, every bit of every element kept.

        It holds the host's dtype: what the device's format would lose is `narrowed`'s to show.

        Args:
            logical: a tensor of this layout's size and dtype, strided in any way.
            fill: what padding holds; NaN shows whoever reads it.
        """
        self._require_standard()
        if tuple(logical.shape) != self.size or dtype_name(logical) != self.dtype:
            raise LayoutError(
                f"pack got {dtype_name(logical)} {tuple(logical.shape)}: this layout is of "
                f"{self.dtype} {self.size}"
            )
        # Whole numbers of the same width: no format's arithmetic touches the bits.
        bits = as_bits(logical)
        rows = bits.unsqueeze(-1) if self.stick_dim == NONE else bits
        order = [dim if dim != NONE else rows.dim() - 1 for dim in self.dim_order or (0,)]
        rows = rows.permute(order)
        tiles, length = self.device_size[self.tile_axis], rows.shape[-1]
        if length != tiles * self.elems_per_stick:
            padded = rows.new_full(
                (*rows.shape[:-1], tiles * self.elems_per_stick), bits_of(fill, logical)
            )
            padded[..., :length] = rows
            rows = padded
        split = rows.reshape(*rows.shape[:-1], tiles, self.elems_per_stick)
        image = split.movedim(0, -2) if len(order) > 1 else split
        return image.contiguous().view(logical.dtype)

    def unpack(self, image: Tensor) -> Tensor:
        """The logical tensor, contiguous, of which `image` is the image."""
        self._require_standard()
        if tuple(image.shape) != self.device_size or dtype_name(image) != self.dtype:
            raise LayoutError(
                f"unpack got {dtype_name(image)} {tuple(image.shape)}: the image of {self.dtype} "
                f"{self.size} in order {list(self.dim_order)} is {self.device_size}"
            )
        split = as_bits(image)
        if len(self.dim_order) > 1:
            split = split.movedim(-2, 0)
        tiles = self.device_size[self.tile_axis]
        rows = split.reshape(*split.shape[:-2], tiles * self.elems_per_stick)
        length = 1 if self.stick_dim == NONE else self.size[self.stick_dim]
        rows = rows[..., :length]
        if self.stick_dim == NONE:
            rows = rows.squeeze(-1)
        dims = [dim for dim in self.dim_order if dim != NONE]
        back = [dims.index(dim) for dim in range(len(dims))]
        return rows.permute(back).contiguous().view(image.dtype)

    def _require_standard(self) -> None:
        if self.arrangement != "STANDARD":
            raise LayoutError(
                f"arrangement {self.arrangement} ({ARRANGEMENTS[self.arrangement]}): where its "
                "elements lie is not public, only STANDARD can be packed"
            )

    def walk(self) -> Iterator[tuple[int, ...]]:
        """All device coordinates in the order of memory."""
        return itertools.product(*map(range, self.device_size))


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if sizes else ()
