"""Detection, with folders that stand for machines: no GPU, no driver, no HIP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polysilicon.api import Device, DeviceError
from polysilicon_amd import device as detection
from polysilicon_amd.chips import ALIASES, ARCHES, CHIPS, GB, chip_of
from polysilicon_amd.device import detect, devices

#: What the kernel driver tells of each node; only the lines that detection reads, and a few more.
_CPU = {"cpu_cores_count": 64, "simd_count": 0, "gfx_target_version": 0, "device_id": 0}


def _gpu(version: int, simds: int, per_unit: int, pci: int, memory_gb: int) -> dict[str, int]:
    return {
        "cpu_cores_count": 0,
        "simd_count": simds,
        "simd_per_cu": per_unit,
        "wave_front_size": 64 if version < 100000 else 32,
        "lds_size_in_kb": 64,
        "gfx_target_version": version,
        "vendor_id": 0x1002,
        "device_id": pci,
        "memory_gb": memory_gb,
    }


_MI300X = _gpu(90402, 1216, 4, 0x74A1, 192)
_MI355X = _gpu(90500, 1024, 4, 0x75A3, 288)
_RX7900 = _gpu(110000, 192, 2, 0x744C, 24)
_RX9070 = _gpu(120001, 112, 2, 0x7550, 16)
_STRIX = _gpu(110501, 80, 2, 0x1586, 1)
#: The graphics of a desktop processor: two compute units, for a screen.
_APU = _gpu(100306, 4, 2, 0x164E, 1)
_RX6800 = _gpu(100300, 120, 2, 0x73BF, 16)


def _machine(root: Path, *nodes: dict[str, int]) -> Path:
    (root / "dev").mkdir(parents=True)
    (root / "dev/kfd").touch()
    for number, node in enumerate(nodes):
        folder = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
        bank = folder / "mem_banks/0"
        bank.mkdir(parents=True)
        lines = [f"{key} {value}" for key, value in node.items() if key != "memory_gb"]
        lines.append(f"unique_id {0xABC0 + number}")
        (folder / "properties").write_text("\n".join(lines) + "\n")
        size = node.get("memory_gb", 0) * GB
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "name", "arch", "units", "memory", "count"),
    [
        ([_CPU, _CPU, *[_MI300X] * 8], "amd:mi300x", "gfx942", 304, 192 * GB, 8),
        ([_CPU, _MI355X], "amd:mi355x", "gfx950", 256, 288 * GB, 1),
        ([_CPU, _RX7900, _APU], "amd:rx7900xtx", "gfx1100", 96, 24 * GB, 1),
        ([_CPU, _RX9070], "amd:rx9070", "gfx1201", 56, 16 * GB, 1),
        # Its memory is the processor's, whatever was set aside at boot.
        ([_CPU, _STRIX], "amd:strixhalo", "gfx1151", 40, None, 1),
    ],
)
def test_chips_are_found_with_their_sizes(
    tmp_path: Path,
    nodes: list[dict[str, int]],
    name: str,
    arch: str,
    units: int,
    memory: int | None,
    count: int,
) -> None:
    (found,) = detect(_machine(tmp_path, *nodes), {})
    assert (found.name, found.arch, found.present) == (name, arch, True)
    assert (found.facts["compute_units"], found.memory_bytes) == (units, memory)
    assert (found.facts["count"], found.torch_device) == (count, "cuda:0")


@pytest.mark.parametrize(
    ("arch", "family", "wave", "lds", "unit", "fp8"),
    [
        ("gfx942", "cdna3", 64, 64, "mfma", "fnuz"),
        ("gfx950", "cdna4", 64, 160, "mfma", "ocp"),
        ("gfx1100", "rdna3", 32, 64, "wmma", "none"),
        ("gfx1151", "rdna3_5", 32, 64, "wmma", "none"),
        ("gfx1201", "rdna4", 32, 64, "wmma", "ocp"),
    ],
)
def test_facts_of_the_claimed_architectures(
    arch: str, family: str, wave: int, lds: int, unit: str, fp8: str
) -> None:
    facts = detection.absent(f"amd:{arch}").facts
    assert facts["family"] == family
    assert (facts["wave_size"], facts["shared_bytes"]) == (wave, lds * 1024)
    assert (facts["matrix_unit"], facts["fp8"]) == (unit, fp8)


def test_a_number_is_counted_for_graphics_that_are_not_offered(tmp_path: Path) -> None:
    (found,) = detect(_machine(tmp_path, _CPU, _APU, _RX7900), {})
    assert (found.name, found.torch_device) == ("amd:rx7900xtx", "cuda:1")


def test_unlike_chips_are_records_of_their_own(tmp_path: Path) -> None:
    found = detect(_machine(tmp_path, _CPU, _MI300X, _RX7900, _MI300X), {})
    assert [(d.name, d.torch_device, d.facts["count"]) for d in found] == [
        ("amd:mi300x", "cuda:0", 2),
        ("amd:rx7900xtx", "cuda:1", 1),
    ]


def test_an_architecture_that_no_table_holds_has_what_the_driver_tells(tmp_path: Path) -> None:
    (found,) = detect(_machine(tmp_path, _CPU, _RX6800), {})
    assert (found.name, found.arch, found.facts["matrix_unit"]) == (
        "amd:gfx1030",
        "gfx1030",
        "none",
    )
    assert (found.facts["wave_size"], found.facts["shared_bytes"]) == (32, 64 * 1024)


def test_a_partition_of_a_chip_has_its_own_size(tmp_path: Path) -> None:
    part = _MI300X | {"simd_count": 152, "memory_gb": 24}
    (found,) = detect(_machine(tmp_path, _CPU, *[part] * 8), {})
    assert (found.name, found.facts["compute_units"]) == ("amd:mi300x", 38)


# --- machines without ----------------------------------------------------------------------------


def test_no_driver_is_no_device(tmp_path: Path) -> None:
    assert detect(tmp_path, {}) == []


def test_a_driver_without_gpus_is_no_device(tmp_path: Path) -> None:
    assert detect(_machine(tmp_path, _CPU), {}) == []
    assert detect(_machine(tmp_path / "empty"), {}) == []


def test_a_container_that_sees_only_the_hosts_sysfs_has_no_device(tmp_path: Path) -> None:
    (_machine(tmp_path, _CPU, _MI300X) / "dev/kfd").unlink()
    assert detect(tmp_path, {}) == []


def test_unreadable_nodes_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(tmp_path, _CPU, _MI300X, _MI300X)
    read = Path.read_text

    def forbidden(file: Path, *args: Any, **kwargs: Any) -> str:
        # Not chmod: tests may run as root, whom no mode stops.
        if file.parent.name == "1":
            raise PermissionError(file)
        return read(file, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", forbidden)
    (found,) = detect(tmp_path, {})
    assert found.facts["count"] == 1


# --- what the environment chooses ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["amd:rx7900xtx"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["amd:rx7900xtx"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, ["amd:rx7900xtx"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["amd:rx7900xtx", "amd:mi300x"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, ["amd:rx7900xtx", "amd:mi355x"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["amd:mi355x"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000abc3"}, ["amd:mi355x"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        # From an entry that names nothing on, HIP reads no further.
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, ["amd:mi300x"]),
    ],
)
def test_visible_devices_are_honoured(
    tmp_path: Path, environment: dict[str, str], names: list[str]
) -> None:
    root = _machine(tmp_path, _CPU, _MI300X, _RX7900, _MI355X)
    found = detect(root, environment)
    assert [device.name for device in found] == names
    assert [device.torch_device for device in found] == [f"cuda:{i}" for i in range(len(names))]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "unset one of them or make"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, "leaves 1 of 2 GPUs"),
        ({"HSA_OVERRIDE_GFX_VERSION": "gfx1100"}, "expected major.minor.step"),
    ],
)
def test_contradictions_are_errors_only_where_there_is_a_gpu(
    tmp_path: Path, environment: dict[str, str], says: str
) -> None:
    assert detect(_machine(tmp_path / "none", _CPU), environment) == []
    with pytest.raises(DeviceError, match=says):
        detect(_machine(tmp_path / "two", _CPU, _MI300X, _MI300X), environment)


def test_an_overridden_architecture_is_what_hip_will_say(tmp_path: Path) -> None:
    root = _machine(tmp_path, _CPU, _RX6800)
    (found,) = detect(root, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert (found.name, found.arch) == ("amd:gfx1100", "gfx1100")


# --- other sources -------------------------------------------------------------------------------


class _NoDriver(Exception):
    pass


def _amdsmi(*arches: str) -> Any:
    asic = {"device_id": "0x74a1", "num_compute_units": 304, "asic_serial": "0xABC"}
    calls: list[str] = []
    return SimpleNamespace(
        AmdSmiException=_NoDriver,
        AmdSmiMemoryType=SimpleNamespace(VRAM=0),
        amdsmi_init=lambda: calls.append("init"),
        amdsmi_shut_down=lambda: calls.append("shut down"),
        amdsmi_get_processor_handles=lambda: list(arches),
        amdsmi_get_gpu_asic_info=lambda arch: asic | {"target_graphics_version": arch},
        amdsmi_get_gpu_memory_total=lambda arch, kind: 192 * GB,
        calls=calls,
    )


def test_amdsmi_is_asked_where_there_is_no_kfd_and_shut_down_again(tmp_path: Path) -> None:
    library = _amdsmi("gfx942", "gfx942")
    (found,) = detect(tmp_path, {}, library)
    assert (found.name, found.facts["count"]) == ("amd:mi300x", 2)
    assert library.calls == ["init", "shut down"]


def test_amdsmi_without_a_driver_is_no_device(tmp_path: Path) -> None:
    library = _amdsmi()

    def init() -> None:
        raise _NoDriver

    library.amdsmi_init = init
    assert detect(tmp_path, {}, library) == []


@pytest.mark.parametrize(
    ("hip", "started", "count"), [("7.0", True, 1), ("7.0", False, 0), (None, True, 0)]
)
def test_torch_is_believed_only_where_it_has_started_hip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None, started: bool, count: int
) -> None:
    told = SimpleNamespace(
        gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304,
        total_memory=192 * GB,
        warp_size=64,
    )
    cuda = SimpleNamespace(
        is_initialized=lambda: started,
        device_count=lambda: 1,
        get_device_properties=lambda index: told,
    )
    torch = SimpleNamespace(version=SimpleNamespace(hip=hip), cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [device.arch for device in detect(tmp_path, {})] == ["gfx942"] * count


def test_asking_imports_no_torch() -> None:
    code = "import sys; from polysilicon_amd.device import devices; devices(); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "triton"} & set(ran.stdout.split())


# --- forced names --------------------------------------------------------------------------------


def _forced(monkeypatch: pytest.MonkeyPatch, name: str, *present: Device) -> list[Device]:
    monkeypatch.setenv("POLYSILICON_DEVICE", name)
    monkeypatch.setattr(detection, "detect", lambda: list(present))
    return devices()


@pytest.mark.parametrize("form", [*CHIPS, *ALIASES, *ARCHES])
def test_forced_chip_is_absent_and_named_as_it_was_forced(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    (found,) = _forced(monkeypatch, f"amd:{form}")
    assert (found.name, found.kind, found.present) == (f"amd:{form}", "amd", False)
    assert found.arch in ARCHES
    assert found.facts["compute_units"]


@pytest.mark.parametrize("name", ["amd", "amd:rx7900", "amd:rx7900xtx", "amd:gfx1100"])
def test_a_forced_chip_that_is_here_is_the_one_that_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    present = detect(_machine(tmp_path, _CPU, _RX7900), {})
    (found,) = _forced(monkeypatch, name, *present)
    assert found.present
    assert name in (found.name, found.kind, f"{found.kind}:{found.arch}")


def test_another_chip_stands_beside_the_one_that_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    present = detect(_machine(tmp_path, _CPU, _RX7900), {})
    found = _forced(monkeypatch, "amd:mi325x", *present)
    assert [(d.name, d.present) for d in found] == [("amd:rx7900xtx", True), ("amd:mi325x", False)]


def test_another_vendors_name_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _forced(monkeypatch, "acme:mi300x") == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("amd", "no AMD GPU on this machine; name one of amd:mi210"),
        ("amd:rx7900xxx", r"no such chip is known \(did you mean amd:rx7900xtx\?\)"),
        ("amd:MI300X", r"did you mean amd:mi300x\?"),
    ],
)
def test_unknown_chip_is_an_error_that_lists_the_forms(
    monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    with pytest.raises(DeviceError, match=says):
        _forced(monkeypatch, name)


# --- the table -----------------------------------------------------------------------------------


def test_every_chip_is_told_from_the_others_by_what_the_driver_tells() -> None:
    for chip in CHIPS.values():
        for pci in chip.pci_devices:
            assert chip_of(chip.arch, pci, chip.compute_units) == chip


def test_typical_chips_are_of_their_architecture() -> None:
    assert {CHIPS[arch.typical].arch for arch in ARCHES.values()} == set(ARCHES)


# --- activation ----------------------------------------------------------------------------------


def test_activation_asks_for_a_rocm_build_of_torch() -> None:
    with pytest.raises(DeviceError, match="built without ROCm: install a ROCm build"):
        detection.activate()


def test_activation_refuses_a_torch_that_numbers_the_gpus_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (present,) = detect(_machine(tmp_path, _CPU, _MI300X), {})
    told = SimpleNamespace(gcnArchName="gfx1100")
    cuda = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda device: told)
    torch = SimpleNamespace(version=SimpleNamespace(hip="7.0"), cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(detection, "detect", lambda: [present])
    with pytest.raises(DeviceError, match="torch's cuda:0 is gfx1100"):
        detection.activate()
