"""What is known of NVIDIA's chips and architectures, as data. Nothing here asks a machine.

Sources: the CUDA C++ programming guide (compute capabilities, shared memory per block), NVIDIA's
architecture white papers and data sheets (multiprocessors, memory, formats of the tensor cores).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

KB = 1024
GB = 10**9

_AMPERE = ("float32", "float16", "bfloat16", "int8")
_ADA = (*_AMPERE, "float8_e4m3fn", "float8_e5m2")
_BLACKWELL = (*_ADA, "float4_e2m1fn_x2")


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One compute capability.

    Attributes:
        name: `sm90`, as devices and kernels write it.
        shared_bytes: shared memory that one block can have, when it opts in to it.
        cores_per_sm: what NVML's number of cores is divided by to count multiprocessors.
        matrix_unit: the widest matrix instruction; `mma` works on all of these.
        tma: the bulk tensor copy engine.
        native_formats: what the matrix unit multiplies, by torch's names.
        typical: the chip whose sizes stand for the architecture where it is forced by name.
    """

    name: str
    shared_bytes: int
    cores_per_sm: int
    matrix_unit: Literal["mma", "wgmma", "tcgen05"]
    tma: bool
    native_formats: tuple[str, ...]
    typical: str


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One product; `memory_bytes` is the data sheet's, a little above what software can use."""

    name: str
    arch: str
    sms: int
    memory_bytes: int


def _arch(
    name: str,
    shared_kb: int,
    matrix_unit: Literal["mma", "wgmma", "tcgen05"],
    formats: tuple[str, ...],
    typical: str,
    *,
    tma: bool = True,
    cores_per_sm: int = 128,
) -> Arch:
    return Arch(
        name=name,
        shared_bytes=shared_kb * KB,
        cores_per_sm=cores_per_sm,
        matrix_unit=matrix_unit,
        tma=tma,
        native_formats=formats,
        typical=typical,
    )


#: sm120 is no smaller sm100: it has neither tcgen05 nor the large shared memory.
ARCHES: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            _arch("sm80", 163, "mma", _AMPERE, "a100", tma=False, cores_per_sm=64),
            _arch("sm86", 99, "mma", _AMPERE, "a40", tma=False),
            _arch("sm89", 99, "mma", _ADA, "l40s", tma=False),
            _arch("sm90", 227, "wgmma", _ADA, "h200"),
            _arch("sm100", 227, "tcgen05", _BLACKWELL, "b200"),
            _arch("sm103", 227, "tcgen05", _BLACKWELL, "b300"),
            _arch("sm120", 99, "mma", _BLACKWELL, "rtx5090"),
            _arch("sm121", 99, "mma", _BLACKWELL, "gb10"),
        )
    }
)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        name: Chip(name=name, arch=arch, sms=sms, memory_bytes=memory * GB)
        for name, arch, sms, memory in (
            ("a100", "sm80", 108, 80),
            ("a10", "sm86", 72, 24),
            ("a40", "sm86", 84, 48),
            ("rtx3090", "sm86", 82, 24),
            ("rtxa6000", "sm86", 84, 48),
            ("l4", "sm89", 58, 24),
            ("l40s", "sm89", 142, 48),
            ("rtx4090", "sm89", 128, 24),
            ("rtx6000ada", "sm89", 142, 48),
            ("h20", "sm90", 78, 96),
            ("h100", "sm90", 132, 80),
            ("h200", "sm90", 132, 141),
            ("gh200", "sm90", 132, 96),
            ("b200", "sm100", 148, 180),
            ("b300", "sm103", 148, 270),
            ("rtx5080", "sm120", 84, 16),
            ("rtx5090", "sm120", 170, 32),
            ("rtxpro6000", "sm120", 188, 96),
            ("gb10", "sm121", 48, 128),
        )
    }
)

#: Words that product names carry and that tell no chip from another.
_NOISE = frozenset({"nvidia", "geforce", "tesla", "quadro", "generation"})


def chip_name(product: str) -> str:
    """The name of the chip in a product's name: `NVIDIA H100 80GB HBM3` → `h100`.

    A product that the table doesn't hold keeps its own words: `Tesla T4` → `t4`.
    """
    words = [word for word in product.lower().replace("-", " ").split() if word not in _NOISE]
    for count in (3, 2, 1):
        if (joined := "".join(words[:count])) in CHIPS:
            return joined
    kept = "-".join(words) or "unknown"
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in kept)
