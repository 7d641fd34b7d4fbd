"""A stand-in for `pynvml` that tells of the GPUs that a test names."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

GIB = 1 << 30


@dataclass(frozen=True)
class Slice:
    """A MIG slice; `profile` as in its name."""

    uuid: str
    profile: str
    sms: int
    memory: int


@dataclass(frozen=True)
class Gpu:
    """One GPU; with slices it is in MIG mode."""

    product: str
    capability: tuple[int, int]
    cores: int
    memory: int | None
    uuid: str = "GPU-0"
    clock: int = 1980
    slices: tuple[Slice, ...] | None = None
    lost: bool = False


class NVMLError(Exception):
    """As pynvml's: `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"code {self.value}"


class FakeNvml:
    """The functions that detection calls, under their names, with pynvml's own codes."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_CLOCK_SM = 1
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *gpus: Gpu, start: int | None = None) -> None:
        self.gpus = gpus
        self.start = start
        self.open = 0

    def nvmlInit(self) -> None:
        if self.start is not None:
            raise NVMLError(self.start)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> tuple[int, int]:
        return gpu.capability

    def nvmlDeviceGetNumGpuCores(self, gpu: Gpu) -> int:
        return gpu.cores

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, kind: int) -> int:
        return gpu.clock

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu | Slice) -> SimpleNamespace:
        if gpu.memory is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=gpu.memory)

    def nvmlDeviceGetName(self, gpu: Gpu | Slice) -> str:
        if isinstance(gpu, Slice):
            whole = next(g for g in self.gpus if gpu in (g.slices or ()))
            return f"{whole.product} MIG {gpu.profile}"
        return gpu.product

    def nvmlDeviceGetUUID(self, gpu: Gpu | Slice) -> str:
        return gpu.uuid

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if gpu.capability < (8, 0):
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [int(gpu.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Slice:
        slices = gpu.slices or ()
        if index >= len(slices):
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return slices[index]

    def nvmlDeviceGetAttributes(self, part: Slice) -> SimpleNamespace:
        return SimpleNamespace(multiprocessorCount=part.sms)


A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 6912, 80 * GIB, clock=1410)
L40S = Gpu("NVIDIA L40S", (8, 9), 18176, 45 * GIB, clock=2520)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 16896, 80 * GIB)
H100_PCIE = Gpu("NVIDIA H100 PCIe", (9, 0), 14592, 80 * GIB, clock=1755)
H200 = Gpu("NVIDIA H200", (9, 0), 16896, 140 * GIB)
B200 = Gpu("NVIDIA B200", (10, 0), 18944, 179 * GIB)
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 21760, 32 * GIB, clock=2407)
GB10 = Gpu("NVIDIA GB10", (12, 1), 6144, None)
T4 = Gpu("Tesla T4", (7, 5), 2560, 15 * GIB)
