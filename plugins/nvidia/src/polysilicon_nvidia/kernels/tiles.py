"""Tiles of the attention kernel by architecture and head size, as data.

The rows are queries × heads of one key head, the keys one step of the loop. On sm90 at least 64
rows make it a `wgmma`; decoding has no more rows than its heads and is bound by memory. Chosen so
that the offline gate passes: no spills, shared memory and code within their limits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The sizes of one program, in rows of queries and in keys, and how Triton builds it."""

    rows: int
    keys: int
    warps: int
    stages: int


def _tile(rows: int, keys: int, warps: int, stages: int) -> Tile:
    return Tile(rows=rows, keys=keys, warps=warps, stages=stages)


#: For 16-bit numbers: architecture → padded head size → tile of a prefill; "" is any other.
PREFILL = {
    "sm80": {64: _tile(128, 64, 4, 3), 128: _tile(128, 64, 8, 3), 256: _tile(64, 32, 8, 3)},
    "sm90": {64: _tile(128, 64, 4, 3), 128: _tile(128, 64, 8, 5), 256: _tile(128, 32, 8, 3)},
    "sm100": {64: _tile(128, 64, 8, 3), 128: _tile(128, 32, 8, 3), 256: _tile(64, 32, 8, 2)},
    "": {64: _tile(64, 64, 4, 2), 128: _tile(128, 64, 8, 3), 256: _tile(64, 32, 8, 3)},
}
#: The same of a decode. A key is found through its block's number, so that two blocks of keys in
#: flight are five stages; architectures of 99 KB have room for one at the larger heads.
DECODE = {
    "sm80": {64: _tile(16, 64, 4, 5), 128: _tile(16, 64, 4, 5), 256: _tile(16, 32, 4, 5)},
    "": {64: _tile(16, 64, 4, 5), 128: _tile(16, 32, 4, 5), 256: _tile(16, 32, 4, 3)},
}
DECODE |= {"sm90": DECODE["sm80"], "sm100": DECODE["sm80"]}
#: float32 has no matrix instruction without rounding: small tiles keep its sums in registers.
FLOAT32 = {64: _tile(32, 32, 4, 2), 128: _tile(16, 32, 4, 2), 256: _tile(16, 16, 8, 2)}


@functools.cache
def tile_for(arch: str, head_size: int, itemsize: int, group: int, max_query: int) -> Tile:
    """The tile of a call; its rows hold at least the `group` of heads that share a key head."""
    size = next(padded for padded in (64, 128, 256) if head_size <= padded)
    family = {"sm103": "sm100"}.get(arch, arch)
    if itemsize == 4:
        tile = FLOAT32[size]
    else:
        tile = DECODE.get(family, DECODE[""])[size]
        if max_query * group > tile.rows:
            tile = PREFILL.get(family, PREFILL[""])[size]
    rows = tile.rows
    while rows < group:
        rows *= 2
    return replace(tile, rows=rows)
