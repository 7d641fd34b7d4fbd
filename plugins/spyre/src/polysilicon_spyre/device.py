"""Which Spyre cards are here: from sysfs and /dev; nothing is opened, torch_spyre not imported.

Three pieces of evidence, each weighed by itself:

- a PCI function with IBM's vendor ID and a Spyre device ID is a card on this machine;
- its IOMMU group under /dev/vfio is a card that this process may drive (user-space driver);
- torch_spyre is the PyTorch backend. It is no card: build hosts have it.

A card is present, so that models run on it, where all three are there. A card that lacks one of
the others is listed with `present=False` and the fact `unusable`, which says what is missing.
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from polysilicon.api import Device, DeviceError
from polysilicon_spyre.chips import PCI_DEVICES, PCI_VENDOR, SPYRE, STICK_BYTES

KIND = "spyre"
SIMULATOR = f"{KIND}:sim"
ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What speaks for a card.

    Attributes:
        cards: PCI functions with a Spyre's IDs.
        usable: those whose VFIO group is there.
        torch_spyre: whether the PyTorch backend can be imported.
    """

    cards: int
    usable: int
    torch_spyre: bool

    @property
    def missing(self) -> str:
        """What keeps a card that is here from being used; empty where nothing does."""
        lacks = []
        if not self.usable:
            lacks.append("its VFIO group is not under /dev/vfio (driver vfio-pci, permissions)")
        if not self.torch_spyre:
            lacks.append("torch_spyre is not installed")
        return "; ".join(lacks)


def devices(
    forced: str | None, *, root: Path = ROOT, torch_spyre: bool | None = None
) -> list[Device]:
    """The cards of this machine as one record, and the device that `POLYSILICON_DEVICE` forces.

    Args:
        forced: `spyre`, `spyre:sim`, a name of another kind, or None.
        root: stands for the file system's root.
        torch_spyre: whether the backend is there; None looks.

    Raises:
        DeviceError: the forced name is of our kind and is neither of the two.
    """
    found = evidence(root, torch_spyre)
    here = [_card(found)] if found.cards else []
    kind, colon, rest = (forced or "").lower().partition(":")
    if kind != KIND:
        return here
    if rest == "sim":
        return [*here, _simulator()]
    if rest != SPYRE.arch and (rest or colon):
        close = difflib.get_close_matches(rest, ("sim", SPYRE.arch), n=1)
        hint = f" (did you mean {KIND}:{close[0]}?)" if close else ""
        raise DeviceError(
            f"there is no chip {forced}{hint}: set POLYSILICON_DEVICE to spyre (the card) or "
            "spyre:sim (the simulator)"
        )
    return here or [_absent(str(forced).lower())]


def evidence(root: Path = ROOT, torch_spyre: bool | None = None) -> Evidence:
    """What speaks for a card on this machine; never raises."""
    cards = [folder for folder in _folders(root / "sys/bus/pci/devices") if _is_card(folder)]
    return Evidence(
        cards=len(cards),
        usable=sum(_has_group(folder, root) for folder in cards),
        torch_spyre=_importable() if torch_spyre is None else torch_spyre,
    )


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # no PCI on this machine, or none that a container shows
        return []


def _is_card(folder: Path) -> bool:
    return _text(folder / "vendor") == PCI_VENDOR and _text(folder / "device") in PCI_DEVICES


def _text(file: Path) -> str:
    try:
        return file.read_text().strip().lower()
    except OSError:  # the device went away, or this user may not read it
        return ""


def _has_group(folder: Path, root: Path) -> bool:
    group = folder / "iommu_group"
    try:
        return group.exists() and (root / "dev/vfio" / group.resolve().name).exists()
    except OSError:
        return False


def _importable() -> bool:
    try:
        return importlib.util.find_spec("torch_spyre") is not None
    except ValueError:  # half-imported, or a stand-in without a spec
        return False


def _card(found: Evidence) -> Device:
    facts: dict[str, str | int | float | bool | None] = {"cards": found.cards, **_facts()}
    if found.missing:
        facts["unusable"] = found.missing
    return Device(
        name=KIND,
        kind=KIND,
        arch=SPYRE.arch,
        torch_device=KIND,
        present=not found.missing,
        memory_bytes=SPYRE.memory_bytes,
        facts=facts,
    )


def _absent(name: str) -> Device:
    return Device(
        name=name,
        kind=KIND,
        arch=SPYRE.arch,
        torch_device=KIND,
        present=False,
        memory_bytes=SPYRE.memory_bytes,
        facts=_facts(),
    )


def _simulator() -> Device:
    # Compiled only on request: the simulated kernels are opaque, and nobody times what is left.
    return Device(
        name=SIMULATOR,
        kind=KIND,
        arch=SPYRE.arch,
        torch_device="cpu",
        simulated=True,
        memory_bytes=SPYRE.memory_bytes,
        compile_default=False,
        facts=_facts(),
    )


def _facts() -> dict[str, str | int | float | bool | None]:
    return {
        "cores": SPYRE.cores,
        "shared_bytes": SPYRE.scratchpad_bytes,
        "stick_bytes": STICK_BYTES,
        "span_bytes": SPYRE.span_bytes,
        "native_formats": ",".join(SPYRE.native_formats),
        "peak_bytes_per_second": SPYRE.peak_bytes_per_second,
    }
