"""Detection on machines that there are and aren't, and chips that are asked for by name."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_nvml import (
    A100,
    B200,
    GB10,
    GIB,
    H100,
    H100_PCIE,
    H200,
    L40S,
    RTX_5090,
    T4,
    FakeNvml,
    Slice,
)

from polysilicon.api import Device, DeviceError, Problem
from polysilicon_nvidia.chips import ARCHES, CHIPS, chip_name
from polysilicon_nvidia.device import absent, activate, detect, devices
from polysilicon_nvidia.plugin import polysilicon_kernels, polysilicon_layouts


@pytest.fixture(autouse=True)
def torch_without_cuda(monkeypatch):
    """torch has started no GPU, whatever else ran in this process on a machine that has one."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialised=False))


def only(nvml: FakeNvml, **environment: str) -> Device:
    (device,) = detect(nvml, environment)
    return device


def names(nvml: FakeNvml, **environment: str) -> list[tuple[str, str]]:
    return [(device.name, device.torch_device) for device in detect(nvml, environment)]


@pytest.mark.parametrize(
    ("gpu", "name", "arch", "sms", "shared", "matrix_unit", "tma"),
    [
        (A100, "nvidia:a100", "sm80", 108, 163, "mma", False),
        (L40S, "nvidia:l40s", "sm89", 142, 99, "mma", False),
        (H100, "nvidia:h100", "sm90", 132, 227, "wgmma", True),
        (H100_PCIE, "nvidia:h100", "sm90", 114, 227, "wgmma", True),
        (H200, "nvidia:h200", "sm90", 132, 227, "wgmma", True),
        (B200, "nvidia:b200", "sm100", 148, 227, "tcgen05", True),
        (RTX_5090, "nvidia:rtx5090", "sm120", 170, 99, "mma", True),
        (GB10, "nvidia:gb10", "sm121", 48, 99, "mma", True),
    ],
)
def test_a_gpu_is_known_by_what_nvml_says(gpu, name, arch, sms, shared, matrix_unit, tma):
    device = only(FakeNvml(gpu))
    assert (device.name, device.kind, device.arch) == (name, "nvidia", arch)
    assert (device.torch_device, device.present, device.graph_capture) == ("cuda:0", True, True)
    assert (device.memory_bytes, device.compile_backend) == (gpu.memory, "inductor")
    facts = device.facts
    assert (facts["sms"], facts["shared_bytes"], facts["tma"]) == (sms, shared * 1024, tma)
    assert facts["matrix_unit"] == matrix_unit
    assert facts["wgmma"] == (matrix_unit == "wgmma")
    assert facts["tcgen05"] == (matrix_unit == "tcgen05")


@pytest.mark.parametrize(
    ("arch", "fp8", "fp4"),
    [
        ("sm80", False, False),
        ("sm86", False, False),
        ("sm89", True, False),
        ("sm90", True, False),
        ("sm100", True, True),
        ("sm103", True, True),
        ("sm120", True, True),
        ("sm121", True, True),
    ],
)
def test_native_formats_follow_the_architecture(arch, fp8, fp4):
    device = absent(f"nvidia:{arch}")
    formats = str(device.facts["native_formats"]).split(",")
    assert ("float8_e4m3fn" in formats, "float4_e2m1fn_x2" in formats) == (fp8, fp4)
    assert ("nvidia.scaled_mm" in {x.name for x in polysilicon_layouts(device)}) == fp8


def test_equal_chips_are_one_record_that_counts_them():
    nvml = FakeNvml(*(replace(H200, uuid=f"GPU-{n}") for n in range(2)))
    device = only(nvml)
    assert (device.torch_device, device.facts["count"]) == ("cuda:0", 2)
    assert nvml.open == 0


def test_unlike_gpus_come_in_cudas_order():
    mixed = FakeNvml(replace(L40S, uuid="GPU-a", clock=1000), replace(H200, uuid="GPU-b"))
    assert names(mixed) == [("nvidia:h200", "cuda:0"), ("nvidia:l40s", "cuda:1")]
    by_slot = names(mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert by_slot == [("nvidia:l40s", "cuda:0"), ("nvidia:h200", "cuda:1")]


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1", [("nvidia:a100", "cuda:0")]),
        ("1,0", [("nvidia:a100", "cuda:0"), ("nvidia:h200", "cuda:1")]),
        ("GPU-b", [("nvidia:a100", "cuda:0")]),
        ("0,7,1", [("nvidia:h200", "cuda:0")]),
        ("-1", []),
        ("", []),
        ("0,0", []),
    ],
)
def test_cuda_visible_devices_is_heeded_as_cuda_does(visible, found):
    mixed = FakeNvml(replace(H200, uuid="GPU-a1"), replace(A100, uuid="GPU-b2"))
    environment = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert names(mixed, **environment) == found


def test_a_gpu_in_mig_mode_is_offered_as_its_slice():
    slices = (Slice("MIG-a", "3g.71gb", 60, 70 * GIB), Slice("MIG-b", "1g.18gb+me", 16, 16 * GIB))
    nvml = FakeNvml(replace(H200, slices=slices))
    device = only(nvml)
    assert (device.name, device.arch) == ("nvidia:h200-mig-3g.71gb", "sm90")
    assert (device.facts["sms"], device.memory_bytes) == (60, 70 * GIB)
    assert only(nvml, CUDA_VISIBLE_DEVICES="MIG-b").name == "nvidia:h200-mig-1g.18gb-me"
    assert names(FakeNvml(replace(H200, slices=()))) == []


def test_a_gpu_that_is_too_old_says_so_where_kernels_are_chosen():
    device = only(FakeNvml(T4))
    assert (device.name, device.arch, device.facts["sms"]) == ("nvidia:t4", "sm75", None)
    (kernel,) = polysilicon_kernels(device)
    problem = Problem(op="paged_attention", dtype="float16")
    assert kernel.supports is not None
    assert str(kernel.supports(problem)).endswith("this is sm75")


@pytest.mark.parametrize("code", [9, 12])
def test_a_machine_without_a_driver_is_silent(code):
    assert detect(FakeNvml(start=code), {}) == []


def test_a_driver_that_is_broken_is_reported_and_offers_nothing():
    with pytest.warns(RuntimeWarning, match="NVML does not start: code 18"):
        assert detect(FakeNvml(start=FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), {}) == []


def test_a_gpu_that_is_lost_is_reported_and_the_others_stay():
    nvml = FakeNvml(replace(H200, lost=True), A100)
    with pytest.warns(RuntimeWarning, match="NVML can't read GPU 0: code 15"):
        assert names(nvml) == [("nvidia:a100", "cuda:0")]
    assert nvml.open == 0


# --- torch --------------------------------------------------------------------------------------


def fake_torch(*, cuda: str | None = "13.0", initialised: bool = True) -> SimpleNamespace:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=140 * GIB, multi_processor_count=132
    )
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_initialized=lambda: initialised,
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_properties=lambda index: properties,
            get_device_capability=lambda device: (9, 0),
        ),
    )


def test_torch_tells_where_nvml_is_missing_and_torch_is_in_use(monkeypatch):
    monkeypatch.setattr("polysilicon_nvidia.device._pynvml", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    (device,) = detect(environment={})
    assert (device.name, device.facts["sms"]) == ("nvidia:h200", 132)


@pytest.mark.parametrize("torch", [fake_torch(cuda=None), fake_torch(initialised=False)])
def test_torch_is_not_asked_where_that_would_start_cuda(monkeypatch, torch):
    monkeypatch.setattr("polysilicon_nvidia.device._pynvml", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert detect(environment={}) == []


def test_activation_passes_where_torch_and_nvml_agree(monkeypatch):
    monkeypatch.setattr("polysilicon_nvidia.device._pynvml", lambda: FakeNvml(H200))
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    activate()


@pytest.mark.parametrize(
    ("cuda", "available", "gpu", "said"),
    [
        (None, False, H200, "torch 2.11.0 is built without CUDA: install a CUDA build of it"),
        ("13.0", False, H200, "torch 2.11.0 can't use the GPU: its CUDA 13.0 needs a newer driver"),
        ("13.0", True, A100, "nvidia:a100 is sm80 and torch's cuda:0 is sm90: set CUDA_DEVICE_OR"),
    ],
)
def test_activation_says_what_to_mend(monkeypatch, cuda, available, gpu, said):
    torch = fake_torch(cuda=cuda)
    torch.cuda.is_available = lambda: available
    monkeypatch.setattr("polysilicon_nvidia.device._pynvml", lambda: FakeNvml(gpu))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(DeviceError) as error:
        activate()
    assert str(error.value).startswith(said)


# --- by name -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_that_is_absent_has_a_complete_record(chip):
    device = absent(f"nvidia:{chip}")
    assert (device.name, device.arch, device.present) == (
        f"nvidia:{chip}",
        CHIPS[chip].arch,
        False,
    )
    assert device.memory_bytes == CHIPS[chip].memory_bytes
    assert set(device.facts) == set(absent("nvidia:h200").facts)
    assert None not in device.facts.values()


@pytest.mark.parametrize("arch", ARCHES)
def test_an_architecture_stands_for_a_typical_chip(arch):
    device = absent(f"nvidia:{arch}")
    assert (device.name, device.arch) == (f"nvidia:{arch}", arch)
    assert device.facts["sms"] == CHIPS[ARCHES[arch].typical].sms


def test_the_forced_chip_is_added_only_where_it_is_absent(monkeypatch):
    monkeypatch.setenv("POLYSILICON_DEVICE", "nvidia:sm90")
    monkeypatch.setattr("polysilicon_nvidia.device._pynvml", lambda: FakeNvml(H200))
    assert [device.name for device in devices()] == ["nvidia:h200"]
    monkeypatch.setenv("POLYSILICON_DEVICE", "nvidia:a100")
    assert [(d.name, d.present) for d in devices()] == [
        ("nvidia:h200", True),
        ("nvidia:a100", False),
    ]
    monkeypatch.setenv("POLYSILICON_DEVICE", "amd:mi300x")
    assert [device.name for device in devices()] == ["nvidia:h200"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nvidia:h2000",
            "no such chip is known (did you mean nvidia:h200?); name one of nvidia:a1",
        ),
        ("nvidia:H200", "did you mean nvidia:h200?"),
        ("nvidia", "there is no NVIDIA GPU on this machine; name one of nvidia:a100"),
    ],
)
def test_a_name_that_no_table_holds_is_answered_with_those_that_there_are(name, said):
    with pytest.raises(DeviceError) as error:
        absent(name)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("Quadro P2000 (Max-Q)", "p2000--max-q-"),
    ],
)
def test_products_are_named_by_their_chip(product, name):
    assert chip_name(product) == name
