"""The known TPUs, as data: what detection finds, `explain` shows and the compiler is told.

Sizes are those of one device as PyTorch and JAX show it: a whole chip, but half of a v7x chip,
which shows as two. `tests/aot` holds them against the table that JAX carries.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Google's PCI vendor ID. Its virtual network and disk devices have it too: look at the device.
PCI_VENDOR = "0x1ae0"
#: TPUs of before 2020: recognised, to say that they are not served.
PCI_TOO_OLD = "0x0027"

LANES, SUBLANES = 128, 8
#: What every chip below has of scalar memory; the page table of paged attention lies in it.
SMEM_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation.

    Attributes:
        arch: as in the device's name, `tpu:<arch>`; Google's own name of it.
        aliases: further names that are understood.
        pci_device: PCI device ID, as sysfs writes it.
        topology: the smallest slice that the compiler accepts by name.
        cores: tensor cores of one device.
        devices_per_chip: as how many devices one chip shows.
        memory_bytes: HBM of one device.
        memory_bytes_per_second: peak rate of that HBM.
        vmem_bytes: vector memory of one core, where a kernel's blocks lie.
        scoped_vmem_bytes: how much of it one kernel may use unless it asks for more.
        mxu: rows and columns of a matrix unit.
        mxus: matrix units of one core.
        native_formats: dtypes that a matrix unit takes on both sides, by torch's names.
    """

    arch: str
    aliases: tuple[str, ...] = ()
    pci_device: str
    topology: str
    cores: int = 1
    devices_per_chip: int = 1
    memory_bytes: int
    memory_bytes_per_second: int
    vmem_bytes: int
    scoped_vmem_bytes: int
    mxu: int
    mxus: int
    native_formats: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.arch, *self.aliases)


CHIPS = (
    Chip(
        arch="v4",
        pci_device="0x005e",
        topology="v4:2x2x1",
        cores=2,
        memory_bytes=32 << 30,
        memory_bytes_per_second=1_230_000_000_000,
        vmem_bytes=16 << 20,
        scoped_vmem_bytes=16 << 20,
        mxu=128,
        mxus=4,
        native_formats=("float32", "bfloat16"),
    ),
    Chip(
        arch="v5e",
        aliases=("v5litepod",),
        pci_device="0x0063",
        topology="v5e:2x2",
        memory_bytes=16 << 30,
        memory_bytes_per_second=820_000_000_000,
        vmem_bytes=128 << 20,
        scoped_vmem_bytes=16 << 20,
        mxu=128,
        mxus=4,
        native_formats=("float32", "bfloat16", "int8"),
    ),
    Chip(
        arch="v5p",
        pci_device="0x0062",
        topology="v5p:2x2x1",
        cores=2,
        memory_bytes=95 << 30,
        memory_bytes_per_second=2_460_000_000_000,
        vmem_bytes=64 << 20,
        scoped_vmem_bytes=16 << 20,
        mxu=128,
        mxus=4,
        native_formats=("float32", "bfloat16", "int8"),
    ),
    Chip(
        arch="v6e",
        pci_device="0x006f",
        topology="v6e:2x2",
        memory_bytes=32 << 30,
        memory_bytes_per_second=1_640_000_000_000,
        vmem_bytes=128 << 20,
        scoped_vmem_bytes=16 << 20,
        mxu=256,
        mxus=2,
        native_formats=("float32", "bfloat16", "int8", "float8_e5m2"),
    ),
    Chip(
        arch="v7x",
        aliases=("tpu7x",),
        pci_device="0x0076",
        topology="tpu7x:2x2x1",
        devices_per_chip=2,
        memory_bytes=96 << 30,
        memory_bytes_per_second=3_700_000_000_000,
        vmem_bytes=64 << 20,
        scoped_vmem_bytes=32 << 20,
        mxu=256,
        mxus=2,
        native_formats=("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    ),
)

#: A kernel that is to compile for every chip may use this much vector memory.
SMALLEST_SCOPED_VMEM = min(chip.scoped_vmem_bytes for chip in CHIPS)


def chip_of(name: str) -> Chip | None:
    """The chip of an architecture's name or alias, None for a name that no chip has."""
    return next((chip for chip in CHIPS if name in chip.names), None)
