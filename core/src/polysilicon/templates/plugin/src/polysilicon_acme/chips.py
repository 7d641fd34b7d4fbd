"""The known Acme chips, as data."""

from __future__ import annotations

from dataclasses import dataclass

#: Stands for your vendor ID: no PCI device has this one. `lspci -nn` shows the IDs.
PCI_VENDOR = "0xffff"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip: what its data sheet says.

    Attributes:
        name: as in the device's name, `acme:<name>`.
        arch: architecture; kernels for `acme:<arch>` serve all its chips.
        pci_device: PCI device ID, as sysfs writes it: 0x and four lower-case digits.
        cores: processor cores.
        scratch_bytes: scratchpad memory of one core.
        memory_bytes: device memory.
        native_formats: dtypes that the matrix unit takes, by torch's names.
    """

    name: str
    arch: str
    pci_device: str
    cores: int
    scratch_bytes: int
    memory_bytes: int
    native_formats: tuple[str, ...]


CHIPS = (
    Chip(
        name="x1",
        arch="a1",
        pci_device="0x0001",
        cores=32,
        scratch_bytes=1 << 20,
        memory_bytes=32 << 30,
        native_formats=("bfloat16", "float16"),
    ),
    Chip(
        name="x2",
        arch="a2",
        pci_device="0x0002",
        cores=64,
        scratch_bytes=2 << 20,
        memory_bytes=96 << 30,
        native_formats=("bfloat16", "float16", "float8_e4m3fn"),
    ),
)

#: The chip that `acme:sim` simulates.
SIMULATED = CHIPS[0]
#: A kernel that is to run on every chip may use this much scratchpad.
SMALLEST_SCRATCH = min(chip.scratch_bytes for chip in CHIPS)
