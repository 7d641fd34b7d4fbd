"""Detection, with a folder that stands for the root of a machine's file system."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from polysilicon.api import DeviceError
from polysilicon_spyre.chips import PCI_DEVICES, PCI_VENDOR, SPYRE
from polysilicon_spyre.device import Evidence, devices, evidence

if TYPE_CHECKING:
    from pathlib import Path

PHYSICAL, VIRTUAL = PCI_DEVICES


def _machine(root: Path, *ids: tuple[str, str], groups: bool = True) -> Path:
    """One PCI function for each pair of vendor and device ID, with its VFIO group or without."""
    for number, (vendor, device) in enumerate(ids):
        slot = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        group = root / f"sys/kernel/iommu_groups/{number + 10}"
        slot.mkdir(parents=True)
        group.mkdir(parents=True)
        (slot / "vendor").write_text(f"{vendor}\n")
        (slot / "device").write_text(f"{device}\n")
        (slot / "iommu_group").symlink_to(group)
        if groups:
            node = root / f"dev/vfio/{number + 10}"
            node.parent.mkdir(parents=True, exist_ok=True)
            node.touch()
    return root


def test_no_card_is_no_device(tmp_path: Path) -> None:
    assert devices(None, root=tmp_path / "nothing", torch_spyre=True) == []
    others = (("0x1ae0", "0x0063"), (PCI_VENDOR, "0x0001"), ("0x8086", PHYSICAL))
    assert devices(None, root=_machine(tmp_path, *others), torch_spyre=True) == []


def test_the_backend_alone_is_no_card(tmp_path: Path) -> None:
    assert devices(None, root=tmp_path, torch_spyre=True) == []


def test_vfio_nodes_alone_are_no_card(tmp_path: Path) -> None:
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/10").touch()
    assert devices(None, root=tmp_path, torch_spyre=True) == []


@pytest.mark.parametrize("device_id", PCI_DEVICES)
def test_cards_with_vfio_and_backend_are_one_present_device(tmp_path: Path, device_id: str) -> None:
    card = (PCI_VENDOR, device_id)
    (found,) = devices(None, root=_machine(tmp_path, card, card), torch_spyre=True)
    assert (found.name, found.arch, found.torch_device) == ("spyre", "spyre", "spyre")
    assert (found.present, found.simulated, found.facts["cards"]) == (True, False, 2)
    assert devices("spyre", root=tmp_path, torch_spyre=True) == [found]
    assert devices("spyre:spyre", root=tmp_path, torch_spyre=True) == [found]


@pytest.mark.parametrize(
    ("groups", "torch_spyre", "says"),
    [(True, False, "torch_spyre is not installed"), (False, True, "VFIO group is not under")],
)
def test_card_that_cannot_be_used_is_listed_with_the_reason(
    tmp_path: Path, groups: bool, torch_spyre: bool, says: str
) -> None:
    root = _machine(tmp_path, (PCI_VENDOR, PHYSICAL), groups=groups)
    (found,) = devices(None, root=root, torch_spyre=torch_spyre)
    assert not found.present
    assert says in str(found.facts["unusable"])


@pytest.mark.parametrize("form", ["spyre", "spyre:spyre", "Spyre"])
def test_forced_card_is_absent_and_complete(tmp_path: Path, form: str) -> None:
    (found,) = devices(form, root=tmp_path, torch_spyre=False)
    assert (found.name, found.present, found.simulated) == (form.lower(), False, False)
    assert found.memory_bytes == SPYRE.memory_bytes == 112 << 30
    assert (found.facts["cores"], found.facts["shared_bytes"]) == (32, 2 << 20)
    assert (found.facts["stick_bytes"], found.facts["span_bytes"]) == (128, 256 << 20)


def test_simulator_is_present_labelled_and_on_the_cpu(tmp_path: Path) -> None:
    (found,) = devices("spyre:sim", root=tmp_path, torch_spyre=False)
    assert (found.present, found.simulated, found.torch_device) == (True, True, "cpu")


def test_simulator_stands_behind_a_card(tmp_path: Path) -> None:
    root = _machine(tmp_path, (PCI_VENDOR, VIRTUAL))
    found = devices("spyre:sim", root=root, torch_spyre=True)
    assert [device.name for device in found] == ["spyre", "spyre:sim"]


def test_simulator_is_there_only_when_asked_for(tmp_path: Path) -> None:
    assert devices(None, root=tmp_path) == []
    assert devices("nvidia:h200", root=tmp_path) == []


@pytest.mark.parametrize(
    ("form", "hint"), [("spyre:sm", "did you mean spyre:sim"), ("spyre:2", ""), ("spyre:", "")]
)
def test_unknown_name_is_an_error_that_lists_the_forms(
    tmp_path: Path, form: str, hint: str
) -> None:
    with pytest.raises(DeviceError, match=f"{hint}.*spyre .the card. or spyre:sim"):
        devices(form, root=tmp_path)


def test_backend_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_spyre.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert evidence(tmp_path) == Evidence(cards=0, usable=0, torch_spyre=True)


def test_a_stand_in_without_a_spec_is_no_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = type(sys)("torch_spyre")
    stand_in.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch_spyre", stand_in)
    assert not evidence(tmp_path).torch_spyre
