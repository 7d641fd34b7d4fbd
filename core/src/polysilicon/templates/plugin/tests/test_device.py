"""Detection, with a folder that stands for the machine's PCI devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from polysilicon.api import DeviceError

from polysilicon_acme.chips import CHIPS, PCI_VENDOR
from polysilicon_acme.device import devices

if TYPE_CHECKING:
    from pathlib import Path

CHIP = CHIPS[0]
#: What may follow `acme:`: the name of each chip, and its architecture.
FORMS = [*dict.fromkeys(form for chip in CHIPS for form in (chip.name, chip.arch))]


def _machine(folder: Path, *ids: tuple[str, str]) -> Path:
    for number, (vendor, device) in enumerate(ids):
        slot = folder / f"0000:0{number}:00.0"
        slot.mkdir()
        (slot / "vendor").write_text(f"{vendor}\n")
        (slot / "device").write_text(f"{device}\n")
    return folder


def test_every_chip_is_told_from_the_others() -> None:
    ids = [chip.pci_device for chip in CHIPS]
    assert len({chip.name for chip in CHIPS} - {"sim"}) == len(set(ids)) == len(CHIPS)
    # As sysfs writes them; `lspci -nn` shows them without 0x.
    assert [text for text in (PCI_VENDOR, *ids) if not re.fullmatch("0x[0-9a-f]{4}", text)] == []


def test_no_chip_is_no_device(tmp_path: Path) -> None:
    other_vendor = ("0x0000", CHIP.pci_device)
    assert devices(None, _machine(tmp_path, other_vendor)) == []
    assert devices(None, tmp_path / "no sysfs") == []


def test_equal_chips_are_one_present_device(tmp_path: Path) -> None:
    slot = (PCI_VENDOR, CHIP.pci_device)
    (found,) = devices(None, _machine(tmp_path, slot, slot))
    assert (found.name, found.arch, found.present) == (f"acme:{CHIP.name}", CHIP.arch, True)
    assert devices("acme", tmp_path) == [found]
    assert devices(f"acme:{CHIP.arch}", tmp_path) == [found]


@pytest.mark.parametrize("form", FORMS)
def test_forced_chip_is_absent_and_named_as_it_was_forced(tmp_path: Path, form: str) -> None:
    (found,) = devices(f"acme:{form}", tmp_path)
    assert (found.name, found.present) == (f"acme:{form}", False)
    assert found.facts["cores"]


def test_simulated_chip_is_present_and_labelled(tmp_path: Path) -> None:
    (found,) = devices("acme:sim", tmp_path)
    assert (found.present, found.simulated, found.torch_device) == (True, True, "cpu")


def test_another_kind_is_not_ours(tmp_path: Path) -> None:
    assert devices(f"other:{CHIP.name}", tmp_path) == []


@pytest.mark.parametrize("forced", ["acme", "acme:nonesuch"])
def test_unknown_chip_is_an_error_that_lists_the_forms(tmp_path: Path, forced: str) -> None:
    with pytest.raises(DeviceError, match=f"one of acme:sim, acme:{CHIP.name}"):
        devices(forced, tmp_path)
