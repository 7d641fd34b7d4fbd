"""Which NVIDIA GPUs are here, told by NVML: no CUDA context, and no torch unless it is in use."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polysilicon.api import Device, DeviceError, forced_device
from polysilicon_nvidia.chips import ARCHES, CHIPS, chip_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KIND = "nvidia"
#: Oldest architecture that the kernels are compiled for; older ones have no bfloat16.
OLDEST = 80


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One GPU, or one MIG slice of one, as the driver tells of it.

    Attributes:
        product: e.g. `NVIDIA H100 80GB HBM3`.
        capability: compute capability, major and minor.
        uuids: by which `CUDA_VISIBLE_DEVICES` may name it, its own first.
        memory_bytes, sms: None where the driver doesn't say.
        profile: of a MIG slice, e.g. `3g.71gb`; empty for a whole GPU.
        speed: cores × clock, by which CUDA orders unlike GPUs.
    """

    product: str
    capability: tuple[int, int]
    uuids: tuple[str, ...] = ()
    memory_bytes: int | None = None
    sms: int | None = None
    profile: str = ""
    speed: int = 0


def devices() -> list[Device]:
    """The GPUs of this machine, and the one that is asked for by name if it is not among them.

    Raises:
        DeviceError: a name of this kind is asked for that no table holds.
    """
    present = detect()
    forced = forced_device()
    if forced is None or forced.partition(":")[0] != KIND:
        return present
    if any(forced in (d.name, d.kind, f"{d.kind}:{d.arch}") for d in present):
        return present
    return [*present, absent(forced)]


def detect(
    nvml: Any | None = None, environment: Mapping[str, str] = os.environ
) -> list[Device]:  # one record for equal chips, in CUDA's order
    """The GPUs that CUDA would offer in this environment.

    Args:
        nvml: a module like `pynvml`; None takes that one, and torch's word where it is missing.
        environment: where `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` are looked up.
    """
    library = nvml or _pynvml()
    gpus = [] if library is None else list(_by_nvml(library))
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        gpus.sort(key=lambda parts: -parts[0].speed)
    offered = _visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        offered = _by_torch()
    records: dict[str, Device] = {}
    for index, seen in enumerate(offered):
        record = _record(seen, index)
        known = records.get(record.name)
        count = 1 if known is None else int(known.facts["count"] or 0) + 1
        first = record if known is None else known
        records[record.name] = replace(first, facts={**first.facts, "count": count})
    return list(records.values())


# --- what the driver says ----------------------------------------------------------------------


def _pynvml() -> Any | None:
    """nvidia-ml-py, which this distribution requires; None where someone removed it."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _by_nvml(nvml: Any) -> Iterator[list[Seen]]:
    """Each GPU in PCI order, as the one or more parts of it that CUDA can use."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        silent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value not in silent:
            _warn(f"NVML does not start: {error}. No NVIDIA GPU is offered; reload its driver")
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                parts = _parts(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as error:
                _warn(f"NVML can't read GPU {index}: {error}. It is not offered; see nvidia-smi")
            else:
                if parts:
                    yield parts
    finally:
        nvml.nvmlShutdown()


def _parts(nvml: Any, handle: Any) -> list[Seen]:
    """The GPU itself or, in MIG mode, its slices."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    arch = ARCHES.get(f"sm{major}{minor}")
    cores = _asked(nvml, nvml.nvmlDeviceGetNumGpuCores, handle) or 0
    clock = _asked(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM) or 1
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    whole = Seen(
        product=_text(nvml.nvmlDeviceGetName(handle)),
        capability=(major, minor),
        uuids=(_text(nvml.nvmlDeviceGetUUID(handle)),),
        memory_bytes=memory and memory.total,
        sms=cores // arch.cores_per_sm if arch and cores else None,
        speed=cores * clock,
    )
    mode = _asked(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return [whole]
    count = _asked(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    slices = (
        _asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, n) for n in range(count)
    )
    return [_slice(nvml, whole, part) for part in slices if part is not None]


def _slice(nvml: Any, whole: Seen, handle: Any) -> Seen:
    attributes = _asked(nvml, nvml.nvmlDeviceGetAttributes, handle)
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return replace(
        whole,
        uuids=(_text(nvml.nvmlDeviceGetUUID(handle)), *whole.uuids),
        memory_bytes=memory and memory.total,
        sms=attributes and attributes.multiprocessorCount,
        profile=_text(nvml.nvmlDeviceGetName(handle)).partition(" MIG ")[2] or "slice",
    )


def _asked(nvml: Any, function: Any, *arguments: Any) -> Any:
    """One of NVML's answers; None where this GPU or driver has none."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        none = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NOT_FOUND)
        if error.value not in (*none, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            raise
        return None


def _text(answer: str | bytes) -> str:
    # Older releases of nvidia-ml-py answer bytes.
    return answer.decode() if isinstance(answer, bytes) else answer


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _by_torch() -> list[Seen]:
    """What torch says, where it has a CUDA context already; asking would make one elsewhere."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None or not torch.cuda.is_initialized():
        return []
    all_properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        Seen(
            product=properties.name,
            capability=(properties.major, properties.minor),
            memory_bytes=properties.total_memory,
            sms=properties.multi_processor_count,
        )
        for properties in all_properties
    ]


def _visible(gpus: Sequence[Sequence[Seen]], wanted: str | None) -> list[Seen]:
    """The parts that CUDA offers, in the order in which it numbers them.

    `CUDA_VISIBLE_DEVICES` names GPUs by index or by the start of a UUID; CUDA ignores it from the
    first entry on that names nothing, and offers nothing where an entry comes twice.
    """
    parts = [part for gpu in gpus for part in gpu]
    chosen = parts if wanted is None else []
    for entry in map(str.strip, (wanted or "").split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            part = gpus[int(entry)][0]
        else:
            named = [p for p in parts if entry and any(u.startswith(entry) for u in p.uuids)]
            if not named:
                break
            part = named[0]
        if part in chosen:
            return []
        chosen.append(part)
    slices = [part for part in chosen if part.profile]
    # A process can use one slice, and no whole GPU beside it.
    return slices[:1] or chosen


# --- records -----------------------------------------------------------------------------------


def absent(name: str) -> Device:
    """The record of a chip or an architecture that is asked for by name, and not here.

    Raises:
        DeviceError: no table holds the name; lists those that there are.
    """
    asked = name.partition(":")[2]
    chip = CHIPS.get(ARCHES[asked].typical if asked in ARCHES else asked)
    if chip is None:
        known = [f"{KIND}:{known}" for known in (*CHIPS, *ARCHES)]
        close = difflib.get_close_matches(name.lower(), known, n=1) if asked else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        there = "there is no NVIDIA GPU on this machine" if not asked else "no such chip is known"
        raise DeviceError(f"device {name!r}: {there}{hint}; name one of {', '.join(known)}")
    return Device(
        name=name,
        kind=KIND,
        arch=chip.arch,
        torch_device="cuda:0",
        present=False,
        memory_bytes=chip.memory_bytes,
        graph_capture=True,
        facts=_facts(chip.arch, chip.sms),
    )


def _record(seen: Seen, index: int) -> Device:
    major, minor = seen.capability
    arch, chip = f"sm{major}{minor}", chip_name(seen.product)
    slice_ = f"-mig-{seen.profile.lower().replace('+', '-')}" if seen.profile else ""
    return Device(
        name=f"{KIND}:{chip}{slice_}",
        kind=KIND,
        arch=arch,
        torch_device=f"cuda:{index}",
        memory_bytes=seen.memory_bytes,
        graph_capture=True,
        activate="polysilicon_nvidia.device:activate",
        facts={**_facts(arch, seen.sms), "product": seen.product},
    )


def _facts(arch: str, sms: int | None) -> dict[str, Any]:
    """What kernels want to know; of an architecture that no table holds, only what was seen."""
    known = ARCHES.get(arch)
    facts: dict[str, Any] = {"sms": sms, "wave_size": 32}
    if known is None:
        return facts
    return facts | {
        "shared_bytes": known.shared_bytes,
        "matrix_unit": known.matrix_unit,
        "tma": known.tma,
        "wgmma": known.matrix_unit == "wgmma",
        "tcgen05": known.matrix_unit == "tcgen05",
        "native_formats": ",".join(known.native_formats),
        "triton": "polysilicon_nvidia.compiled:triton",
    }


def activate() -> None:
    """Checks that torch can use the GPUs that NVML tells of, and numbers them alike.

    Raises:
        DeviceError: it can't; says what to install or to set.
    """
    import torch

    if torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of it "
            "(https://pytorch.org/get-started/locally) to run on the GPU"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} can't use the GPU: its CUDA {torch.version.cuda} needs a "
            "newer driver, or CUDA_VISIBLE_DEVICES hides the GPU; see nvidia-smi"
        )
    for device in detect():
        major, minor = torch.cuda.get_device_capability(device.torch_device)
        if f"sm{major}{minor}" != device.arch:
            raise DeviceError(
                f"{device.name} is {device.arch} and torch's {device.torch_device} is "
                f"sm{major}{minor}: set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both number the "
                "GPUs alike"
            )
