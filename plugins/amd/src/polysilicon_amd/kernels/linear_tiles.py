"""Sizes of the linear kernel's programs, per architecture and number of tokens, as data.

Found by compiling, not by measuring: tiles without spills, of which each wave has whole matrix
instructions. They say nothing of speed until a chip has run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from polysilicon_amd.chips import ARCHES, CHIPS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Sums are split until each compute unit has this many programs.
PROGRAMS_PER_UNIT = 2
#: Most inputs, outputs and stride: offsets inside of a tile are 32-bit, for buffer loads.
MOST_SIZE = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's work, up to a number of tokens.

    Attributes:
        tokens: highest number of tokens for which it is used; None for any.
        m, n, k: tokens, outputs, and inputs in one step.
        warps: waves of a program.
        stages: steps whose loads are under way; RDNA3 has no registers for a second.
        waves_per_eu: waves on one SIMD for which the compiler leaves registers; 0: its own choice.
        instruction: rows of the matrix instruction, `matrix_instr_nonkdim`; WMMA has 16 only.
        kpack: matrix instructions whose operands lie side by side in a lane; CDNA3 needs two to
            use up 16 bytes.
    """

    tokens: int | None
    m: int
    n: int
    k: int
    warps: int
    stages: int
    waves_per_eu: int = 0
    instruction: int = 16
    kpack: int = 1


# Up to 64 tokens, each wave has outputs of its own, so that its part of the weight goes from memory
# into the registers of the matrix instruction. Of more tokens, waves share the weight through LDS.
_CDNA3 = (
    Tile(tokens=16, m=16, n=64, k=128, warps=4, stages=2, kpack=2),
    Tile(tokens=64, m=64, n=128, k=128, warps=4, stages=2, kpack=2),
    Tile(tokens=None, m=128, n=128, k=64, warps=8, stages=2),
)
_CDNA4 = (
    Tile(tokens=16, m=16, n=64, k=128, warps=4, stages=2),
    Tile(tokens=64, m=64, n=128, k=128, warps=4, stages=2),
    Tile(tokens=None, m=128, n=128, k=64, warps=8, stages=2),
)
_RDNA3 = (
    Tile(tokens=16, m=16, n=64, k=128, warps=4, stages=1),
    Tile(tokens=64, m=64, n=128, k=64, warps=4, stages=1),
    Tile(tokens=None, m=128, n=128, k=32, warps=8, stages=1),
)
_RDNA4 = (
    Tile(tokens=16, m=16, n=64, k=128, warps=4, stages=2),
    Tile(tokens=64, m=64, n=128, k=64, warps=4, stages=2),
    Tile(tokens=None, m=128, n=128, k=32, warps=8, stages=2),
)

#: Architectures that the kernel is compiled for and tested on offline.
TILES: Mapping[str, tuple[Tile, ...]] = MappingProxyType(
    {
        "gfx942": _CDNA3,
        "gfx950": _CDNA4,
        "gfx1100": _RDNA3,
        "gfx1151": _RDNA3,
        "gfx1201": _RDNA4,
    }
)


def tile_for(arch: str, tokens: int) -> Tile:
    """The tile of an architecture for a number of tokens."""
    return next(t for t in TILES[arch] if t.tokens is None or tokens <= t.tokens)


def workspace_bytes(arch: str) -> int:
    """The most that parts of a split sum take: two programs a compute unit, in float32."""
    units = CHIPS[ARCHES[arch].typical].compute_units
    return max(PROGRAMS_PER_UNIT * units * tile.m * tile.n * 4 for tile in TILES[arch])
