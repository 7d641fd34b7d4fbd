"""Detection, with folders that stand for a machine's /sys and /dev."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING

import pytest

from polysilicon.api import DeviceError
from polysilicon_tpu.chips import CHIPS, Chip, chip_of
from polysilicon_tpu.device import Found, devices, look

if TYPE_CHECKING:
    from pathlib import Path

GOOGLE, VIRTUAL_NETWORK = "0x1ae0", "0x0042"


class Machine:
    """A /sys and a /dev that tests fill."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.dev = folder / "sys", folder / "dev"
        self.slots = self.sys / "bus" / "pci" / "devices"
        for made in (self.slots, self.sys / "class" / "accel", self.dev / "vfio"):
            made.mkdir(parents=True)

    def plug(self, vendor: str, device: str, *, group: bool = True, node: bool = True) -> None:
        """A PCI device; `group` gives it an IOMMU group, `node` that group's VFIO device."""
        number = len(list(self.slots.iterdir()))
        slot = self.slots / f"0000:00:{number:02x}.0"
        slot.mkdir()
        (slot / "vendor").write_text(f"{vendor}\n")
        (slot / "device").write_text(f"{device}\n")
        if group:
            real = self.sys / "kernel" / "iommu_groups" / str(number)
            real.mkdir(parents=True)
            (slot / "iommu_group").symlink_to(real)
        if node:
            (self.dev / "vfio" / str(number)).touch()

    def look(self, **environment: str) -> Found:
        return look(self.sys, self.dev, environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def absent(machine: Machine) -> Found:
    return machine.look()


@pytest.mark.parametrize("chip", CHIPS, ids=[chip.arch for chip in CHIPS])
def test_every_chip_is_found_by_its_pci_device(machine: Machine, chip: Chip) -> None:
    machine.plug(GOOGLE, chip.pci_device)
    (found,) = devices(None, machine.look())
    assert (found.arch, found.present) == (chip.arch, True)
    assert found.name == f"tpu:{found.arch}"


def test_eight_chips_are_one_device_that_counts_them(machine: Machine) -> None:
    machine.plug(GOOGLE, VIRTUAL_NETWORK, group=False, node=False)
    for _ in range(8):
        machine.plug(GOOGLE, "0x0063")
    (found,) = devices(None, machine.look())
    assert (found.name, found.facts["chips"], found.torch_device) == ("tpu:v5e", 8, "tpu")


def test_v4_machine_has_accel_nodes_instead_of_vfio(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x005e", group=False, node=False)
    (machine.dev / "accel0").touch()
    (found,) = devices(None, machine.look())
    assert found.name == "tpu:v4"


def test_chip_without_a_node_is_not_usable_and_evidence_says_so(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x006f", node=False)
    found = machine.look()
    assert devices(None, found) == []
    assert "is a TPU v6e, but neither" in found.evidence[0]


def test_googles_virtual_network_is_no_tpu(machine: Machine) -> None:
    machine.plug(GOOGLE, VIRTUAL_NETWORK)
    found = machine.look()
    assert devices(None, found) == []
    assert "is no TPU that this version knows" in found.evidence[0]


def test_tpu_before_v4_is_named_and_not_served(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x0027")
    found = machine.look()
    assert devices(None, found) == []
    assert "TPU v2 or v3, which is not served" in found.evidence[0]


def test_vfio_card_of_another_vendor_is_no_tpu(machine: Machine) -> None:
    spyre = ("0x1014", "0x06a7")
    machine.plug(*spyre)
    assert devices(None, machine.look()) == []


def test_neural_processor_of_another_vendor_is_no_tpu(machine: Machine) -> None:
    intel = ("0x8086", "0x7d1d")
    machine.plug(*intel, group=False, node=False)
    (machine.dev / "accel").mkdir()
    (machine.dev / "accel" / "accel0").touch()
    assert devices(None, machine.look()) == []


def test_tpu_beside_a_foreign_accel_folder_is_not_usable_through_it(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x005e", group=False, node=False)
    (machine.dev / "accel").mkdir()
    (machine.dev / "accel" / "accel0").touch()
    assert devices(None, machine.look()) == []


def test_empty_accel_class_is_no_tpu(machine: Machine) -> None:
    assert list((machine.sys / "class" / "accel").iterdir()) == []
    assert devices(None, machine.look()) == []


def test_machine_without_sysfs_has_no_tpu(tmp_path: Path) -> None:
    assert devices(None, look(tmp_path / "sys", tmp_path / "dev", {})) == []


def test_environment_alone_makes_no_tpu(machine: Machine) -> None:
    assert devices(None, machine.look(TPU_ACCELERATOR_TYPE="v6e-8", TPU_WORKER_ID="0")) == []


def test_environment_refines_a_tpu_that_is_here(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x006f")
    (found,) = devices(None, machine.look(TPU_ACCELERATOR_TYPE="v6e-8"))
    assert found.facts["accelerator_type"] == "v6e-8"


@pytest.mark.parametrize(
    ("installed", "state"),
    [((), "absent"), (("jax",), "absent"), (("jax", "libtpu"), "aot_only")],
)
def test_installed_compiler_is_a_capability_and_no_presence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], state: str
) -> None:
    monkeypatch.setattr(
        "polysilicon_tpu.device.find_spec", lambda name: name if name in installed else None
    )
    found = machine.look()
    assert (found.state, devices(None, found)) == (state, [])


def test_state_is_present_only_with_a_usable_chip(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x0076")
    found = machine.look()
    assert found.state == "present"
    assert devices(None, found)[0].facts["state"] == "present"


@pytest.mark.parametrize(
    ("form", "arch"),
    [(name, chip.arch) for chip in CHIPS for name in chip.names],
)
def test_forced_chip_is_absent_and_named_as_it_was_forced(
    absent: Found, form: str, arch: str
) -> None:
    (found,) = devices(f"tpu:{form}".upper(), absent)
    assert (found.name, found.arch, found.present) == (f"tpu:{form}", arch, False)
    assert found.facts["topology"]


def test_golden_facts_of_v6e(absent: Found) -> None:
    (found,) = devices("tpu:v6e", absent)
    told = {name: found.facts[name] for name in ("vmem_bytes", "smem_bytes", "mxu", "lanes")}
    assert told == {"vmem_bytes": 128 << 20, "smem_bytes": 1 << 20, "mxu": 256, "lanes": 128}
    assert (found.memory_bytes, found.facts["sublanes"]) == (32 << 30, 8)
    assert found.facts["native_formats"] == "float32,bfloat16,int8,float8_e5m2"


def test_forced_chip_that_is_here_is_present_under_the_forced_name(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x0076")
    (found,) = devices("tpu:tpu7x", machine.look())
    assert (found.name, found.arch, found.present) == ("tpu:tpu7x", "v7x", True)


def test_kind_alone_is_the_chip_that_is_here(machine: Machine) -> None:
    machine.plug(GOOGLE, "0x0063")
    (found,) = devices("tpu", machine.look())
    assert (found.name, found.present) == ("tpu:v5e", True)


def test_kind_alone_without_a_chip_says_which_forms_there_are(absent: Found) -> None:
    with pytest.raises(DeviceError, match=r"there is no TPU here .*one of tpu:v4, tpu:v5e"):
        devices("tpu", absent)


def test_unknown_chip_is_an_error_with_the_close_one(absent: Found) -> None:
    with pytest.raises(DeviceError, match=r"no TPU tpu:v6 \(did you mean tpu:v6e\?\)"):
        devices("tpu:v6", absent)


def test_another_kind_is_not_ours(absent: Found) -> None:
    assert devices("nvidia:h200", absent) == []


def test_names_and_pci_devices_are_unique() -> None:
    names = [name for chip in CHIPS for name in chip.names]
    assert len(set(names)) == len(names)
    assert len({chip.pci_device for chip in CHIPS}) == len(CHIPS)
    assert chip_of("v3") is None


def test_detection_here_is_quick() -> None:
    importlib.util.find_spec("jax")  # the first look fills Python's cache of folders
    begin = time.perf_counter()
    look()
    # Ten times what it takes: this only keeps runtimes, which take seconds, out.
    assert time.perf_counter() - begin < 0.05
