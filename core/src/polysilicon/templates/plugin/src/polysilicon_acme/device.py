"""Which Acme chips are here: read from sysfs; no driver is opened, no context is made."""

from __future__ import annotations

import difflib
from pathlib import Path

from polysilicon.api import Device, DeviceError

from polysilicon_acme.chips import CHIPS, PCI_VENDOR, SIMULATED, Chip

KIND = "acme"
SIMULATOR = f"{KIND}:sim"
#: The torch device of your PyTorch backend; simulated tensors lie on the CPU.
TORCH_DEVICE = "cpu"
PCI = Path("/sys/bus/pci/devices")


def devices(forced: str | None, pci: Path = PCI) -> list[Device]:
    """The chips of this machine, and the one that `POLYSILICON_DEVICE` forces.

    Args:
        forced: `acme`, alone or with a chip, an architecture or `sim`; or another kind.
        pci: the folder of PCI devices in sysfs.

    Raises:
        DeviceError: the forced name is of our kind and no chip of ours has it.
    """
    here = [_record(f"{KIND}:{chip.name}", chip) for chip in _chips(pci)]
    kind, _, name = (forced or "").lower().partition(":")
    if kind != KIND or any(name in (f.name.partition(":")[2], f.arch) for f in here):
        return here
    if not name and here:
        return here
    return [*here, _forced(name)]


def _chips(pci: Path) -> list[Chip]:
    """The known chips with a PCI device here, each once."""
    ids = {
        _text(folder / "device")
        for folder in (pci.iterdir() if pci.is_dir() else ())
        if _text(folder / "vendor") == PCI_VENDOR
    }
    return [chip for chip in CHIPS if chip.pci_device in ids]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip().lower()
    except OSError:  # the device went away, or this user may not read it
        return ""


def _forced(name: str) -> Device:
    """The record of a chip that is not on this machine."""
    if name == "sim":
        return _record(SIMULATOR, SIMULATED, simulated=True)
    for chip in CHIPS:
        if name in (chip.name, chip.arch):
            return _record(f"{KIND}:{name}", chip, present=False)
    known = ["sim", *dict.fromkeys(n for chip in CHIPS for n in (chip.name, chip.arch))]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {KIND}:{close[0]}?)" if close else ""
    forms = ", ".join(f"{KIND}:{form}" for form in known)
    came = f"there is no chip {KIND}:{name}{hint}" if name else f"there is no {KIND} chip here"
    raise DeviceError(f"{came}: name one of {forms}")


def _record(name: str, chip: Chip, *, present: bool = True, simulated: bool = False) -> Device:
    return Device(
        name=name,
        kind=KIND,
        arch=chip.arch,
        torch_device=TORCH_DEVICE,
        present=present,
        simulated=simulated,
        memory_bytes=chip.memory_bytes,
        facts={
            "cores": chip.cores,
            "scratch_bytes": chip.scratch_bytes,
            "native_formats": ",".join(chip.native_formats),
        },
    )
