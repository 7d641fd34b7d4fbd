"""What is known of AMD's chips and architectures, as data. Nothing here asks a machine.

Sources: AMD's instruction set documents (wave size, LDS, matrix instructions and the formats that
they multiply), its data sheets (compute units, memory) and the PCI ID database.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

KB = 1024
GB = 1 << 30  # AMD's data sheets count memory in powers of two

_RDNA3 = ("float16", "bfloat16", "int8")
_CDNA2 = ("float64", "float32", "float16", "bfloat16", "int8")
_CDNA3 = (*_CDNA2, "float8_e4m3fnuz", "float8_e5m2fnuz")
_CDNA4 = (*_CDNA2, "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
_RDNA4 = (*_RDNA3, "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One instruction set.

    Attributes:
        name: `gfx942`, as devices and kernels write it: without `:sramecc+:xnack-`.
        family: `cdna3`, `rdna4` …
        wave_size: threads of a wave, as Triton compiles it.
        lds_bytes: LDS that one workgroup can have; the compiler does not check it.
        lds_pool_bytes: LDS that the workgroups of four SIMDs share: a compute unit's on CDNA, a
            workgroup processor's (two compute units) on RDNA.
        matrix_unit: kind of the matrix instructions.
        native_formats: what they multiply, by torch's names. All else is emulated by the compiler,
            without a word and many times slower.
        typical: the chip whose sizes stand for the architecture where it is forced by name.
    """

    name: str
    family: str
    wave_size: int
    lds_bytes: int
    lds_pool_bytes: int
    matrix_unit: Literal["mfma", "wmma", "none"]
    native_formats: tuple[str, ...]
    typical: str

    @property
    def fp8(self) -> str:
        """Which of the two incompatible fp8 encodings is native: `fnuz`, `ocp` or `none`."""
        if "float8_e4m3fnuz" in self.native_formats:
            return "fnuz"
        return "ocp" if "float8_e4m3fn" in self.native_formats else "none"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One product.

    Attributes:
        memory_bytes: the data sheet's; None where it shares the processor's memory.
        pci_devices: PCI device IDs, those of virtual functions too; products may share one, and
            then differ in compute units.
    """

    name: str
    arch: str
    compute_units: int
    memory_bytes: int | None
    pci_devices: tuple[int, ...]


def _cdna(name: str, family: str, lds_kb: int, formats: tuple[str, ...], typical: str) -> Arch:
    return Arch(
        name=name,
        family=family,
        wave_size=64,
        lds_bytes=lds_kb * KB,
        lds_pool_bytes=lds_kb * KB,
        matrix_unit="mfma",
        native_formats=formats,
        typical=typical,
    )


def _rdna(name: str, family: str, formats: tuple[str, ...], typical: str) -> Arch:
    return Arch(
        name=name,
        family=family,
        wave_size=32,
        lds_bytes=64 * KB,
        lds_pool_bytes=128 * KB,
        matrix_unit="wmma",
        native_formats=formats,
        typical=typical,
    )


ARCHES: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            _cdna("gfx90a", "cdna2", 64, _CDNA2, "mi210"),
            _cdna("gfx942", "cdna3", 64, _CDNA3, "mi300x"),
            _cdna("gfx950", "cdna4", 160, _CDNA4, "mi355x"),
            _rdna("gfx1100", "rdna3", _RDNA3, "rx7900xtx"),
            _rdna("gfx1101", "rdna3", _RDNA3, "rx7800xt"),
            _rdna("gfx1102", "rdna3", _RDNA3, "rx7600"),
            _rdna("gfx1150", "rdna3_5", _RDNA3, "radeon890m"),
            _rdna("gfx1151", "rdna3_5", _RDNA3, "strixhalo"),
            _rdna("gfx1200", "rdna4", _RDNA4, "rx9060xt"),
            _rdna("gfx1201", "rdna4", _RDNA4, "rx9070xt"),
        )
    }
)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        name: Chip(
            name=name,
            arch=arch,
            compute_units=units,
            memory_bytes=memory * GB if memory else None,
            pci_devices=ids,
        )
        for name, arch, units, memory, ids in (
            ("mi210", "gfx90a", 104, 64, (0x740F,)),
            ("mi300a", "gfx942", 228, 128, (0x74A0,)),
            ("mi300x", "gfx942", 304, 192, (0x74A1, 0x74A9, 0x74B5, 0x74BD)),
            ("mi308x", "gfx942", 80, 192, (0x74A2, 0x74B6)),
            ("mi325x", "gfx942", 304, 256, (0x74A5, 0x74B9)),
            ("mi350x", "gfx950", 256, 288, (0x75A0, 0x75B0)),
            ("mi355x", "gfx950", 256, 288, (0x75A3, 0x75B3)),
            ("rx7900xtx", "gfx1100", 96, 24, (0x744C,)),
            ("rx7900xt", "gfx1100", 84, 20, (0x744C,)),
            ("rx7900gre", "gfx1100", 80, 16, (0x744C,)),
            ("w7900", "gfx1100", 96, 48, (0x7448,)),
            ("w7800", "gfx1100", 70, 32, (0x745E,)),
            ("rx7800xt", "gfx1101", 60, 16, (0x747E,)),
            ("rx7600", "gfx1102", 32, 8, (0x7480,)),
            ("radeon890m", "gfx1150", 16, 0, (0x150E,)),
            ("strixhalo", "gfx1151", 40, 0, (0x1586,)),
            ("rx9060xt", "gfx1200", 32, 16, (0x7590,)),
            ("rx9070xt", "gfx1201", 64, 16, (0x7550,)),
            ("rx9070", "gfx1201", 56, 16, (0x7550,)),
            ("r9700", "gfx1201", 64, 32, (0x7551,)),
        )
    }
)

#: Further names by which users may ask for a chip.
ALIASES: Mapping[str, str] = MappingProxyType({"rx7900": "rx7900xtx"})

#: Graphics inside of processors, for a screen: HIP counts them, and nobody wants a model there.
DISPLAY_ONLY = frozenset({"gfx902", "gfx909", "gfx90c", "gfx1033", "gfx1035", "gfx1036"})


def chip_of(arch: str, pci_device: int | None, compute_units: int | None) -> Chip | None:
    """The product of a GPU, None where the table can't tell."""
    found = [c for c in CHIPS.values() if c.arch == arch and pci_device in c.pci_devices]
    if len(found) > 1:
        found = [chip for chip in found if chip.compute_units == compute_units]
    return found[0] if found else None
