"""Detection, with a folder that stands for the machine's PCI devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from polysilicon.api import DeviceError

from polysilicon_acme.chips import CHIPS, PCI_VENDOR
from polysilicon_acme.device import devices

if TYPE_CHECKING:
    from pathlib import Path


def _machine(folder: Path, *ids: tuple[str, str]) -> Path:
    for number, (vendor, device) in enumerate(ids):
        slot = folder / f"0000:0{number}:00.0"
        slot.mkdir()
        (slot / "vendor").write_text(f"{vendor}\n")
        (slot / "device").write_text(f"{device}\n")
    return folder


def test_no_chip_is_no_device(tmp_path: Path) -> None:
    other_vendor = ("0x8086", "0x0001")
    assert devices(None, _machine(tmp_path, other_vendor)) == []
    assert devices(None, tmp_path / "no sysfs") == []


def test_equal_chips_are_one_present_device(tmp_path: Path) -> None:
    chip = (PCI_VENDOR, CHIPS[0].pci_device)
    (found,) = devices(None, _machine(tmp_path, chip, chip))
    assert (found.name, found.arch, found.present) == ("acme:x1", "a1", True)
    assert devices("acme", tmp_path) == [found]
    assert devices("acme:a1", tmp_path) == [found]


@pytest.mark.parametrize("form", ["x1", "x2", "a1", "a2"])
def test_forced_chip_is_absent_and_named_as_it_was_forced(tmp_path: Path, form: str) -> None:
    (found,) = devices(f"acme:{form}", tmp_path)
    assert (found.name, found.present) == (f"acme:{form}", False)
    assert found.facts["cores"]


def test_simulated_chip_is_present_and_labelled(tmp_path: Path) -> None:
    (found,) = devices("acme:sim", tmp_path)
    assert (found.present, found.simulated, found.torch_device) == (True, True, "cpu")


def test_another_kind_is_not_ours(tmp_path: Path) -> None:
    assert devices("other:x1", tmp_path) == []


@pytest.mark.parametrize("forced", ["acme", "acme:x9"])
def test_unknown_chip_is_an_error_that_lists_the_forms(tmp_path: Path, forced: str) -> None:
    with pytest.raises(DeviceError, match="one of acme:sim, acme:x1"):
        devices(forced, tmp_path)
