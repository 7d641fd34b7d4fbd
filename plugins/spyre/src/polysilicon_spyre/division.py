"""Which core computes what of a matrix product: exact divisors only, stick dims counted in sticks.

Two of the compiler's three passes: the span limit commits the splits that it needs, then the
largest output dim is split first, the other next, and the summed dim takes what is left. The pass
between them, which compares costs for products of many rows, is not modelled here; for products
that it declines, such as those of one row, the splits are those that torch_spyre makes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from polysilicon_spyre.chips import SPYRE, STICK_BYTES


@dataclass(frozen=True, kw_only=True)
class Division:
    """One product [rows, depth] × [depth, columns] cut over the cores.

    Attributes:
        rows: rows of x, single ones.
        columns: sticks of the result's last dim.
        depth: sticks of the summed dim.
        splits: into how many parts (rows, columns, depth) are cut.
    """

    rows: int
    columns: int
    depth: int
    splits: tuple[int, int, int]

    @property
    def cores(self) -> int:
        """Cores that have work."""
        return self.splits[0] * self.splits[1] * self.splits[2]

    @functools.cached_property
    def row_parts(self) -> tuple[slice, ...]:
        """The rows of each part."""
        return parts(self.rows, self.splits[0])

    @functools.cached_property
    def depth_parts(self) -> tuple[slice, ...]:
        """The sticks of the summed dim of each part."""
        return parts(self.depth, self.splits[2])


@functools.lru_cache(maxsize=4096)
def divide(rows: int, columns: int, depth: int, depth_elements: int) -> Division:
    """Cuts a product over the cores of a card.

    Args:
        rows: rows of x.
        columns: sticks of the result's last dim.
        depth: sticks of the summed dim.
        depth_elements: its elements: how many sticks each column stick of the weight takes.

    Raises:
        ValueError: no split keeps a core's part of the weight within the span limit.
    """
    spanning = span_split(columns, depth_elements)
    if spanning is None:
        raise ValueError(span_text(columns, depth_elements))
    splits = {"rows": 1, "columns": spanning, "depth": 1}
    sizes = {"rows": rows, "columns": columns // spanning, "depth": depth}
    for dim in [*sorted(("rows", "columns"), key=lambda dim: -sizes[dim]), "depth"]:
        left = SPYRE.cores // (splits["rows"] * splits["columns"] * splits["depth"])
        splits[dim] *= _largest_divisor(sizes[dim], left)
    return Division(
        rows=rows,
        columns=columns,
        depth=depth,
        splits=(splits["rows"], splits["columns"], splits["depth"]),
    )


def span_split(columns: int, depth_elements: int) -> int | None:
    """The fewest parts of the weight that each keep the span limit; None where none do."""
    for count in range(1, SPYRE.cores + 1):
        span = columns // count * depth_elements * STICK_BYTES
        if columns % count == 0 and span <= SPYRE.span_bytes:
            return count
    return None


def span_text(columns: int, depth_elements: int) -> str:
    """Why a weight can't be cut so that each core's part keeps the span limit."""
    total = columns * depth_elements * STICK_BYTES
    return (
        f"a weight of {columns} × {depth_elements} sticks, {total >> 20} MiB, has no equal parts "
        f"of at most {SPYRE.span_bytes >> 20} MiB for {SPYRE.cores} cores: pad the outputs to a "
        "number of sticks with more divisors"
    )


def rows_per_pass(columns: int, depth: int) -> int:
    """Rows whose activations stay within the span limit of one core, however they are cut."""
    return max(1, SPYRE.span_bytes // (STICK_BYTES * max(columns, depth, 1)))


@functools.lru_cache(maxsize=4096)
def divide_rows(rows: int) -> tuple[slice, ...]:
    """Rows over the cores, for what sums along a row: whole rows each, the row is not cut."""
    return parts(rows, _largest_divisor(rows, SPYRE.cores))


def _largest_divisor(size: int, most: int) -> int:
    return next(count for count in range(min(size, most), 0, -1) if size % count == 0)


def parts(size: int, count: int) -> tuple[slice, ...]:
    """A dim in `count` equal parts; core `n` of those that differ in it has part `n`."""
    step = size // count
    return tuple(slice(at * step, at * step + step) for at in range(count))
