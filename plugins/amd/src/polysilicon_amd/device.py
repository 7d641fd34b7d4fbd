"""Which AMD GPUs are here, told by the kernel driver; HIP is never started for it."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysilicon.api import Device, DeviceError, forced_device
from polysilicon_amd.chips import ALIASES, ARCHES, CHIPS, DISPLAY_ONLY, chip_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KIND = "amd"
_NODES = "sys/class/kfd/kfd/topology/nodes"
#: Kinds of memory banks of a node: visible to the processor, and not.
_LOCAL_HEAPS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One GPU, or one partition of one, as its driver tells of it; None where it doesn't say.

    Attributes:
        arch: e.g. `gfx942`.
        unique_id: the hexadecimal digits by which `GPU-…` names it.
    """

    arch: str
    pci_device: int | None = None
    compute_units: int | None = None
    memory_bytes: int | None = None
    wave_size: int | None = None
    lds_bytes: int | None = None
    unique_id: str = ""


def devices() -> list[Device]:
    """The GPUs of this machine, and the one that is asked for by name if it is not among them.

    Raises:
        DeviceError: a name of this kind is asked for that no table holds, or the variables that
            choose GPUs contradict each other.
    """
    present = detect()
    forced = forced_device()
    if forced is None or forced.partition(":")[0] != KIND:
        return present
    if any(forced in (d.name, d.kind, f"{d.kind}:{d.arch}") for d in present):
        return present
    asked = forced.partition(":")[2]
    chip = f"{KIND}:{ALIASES.get(asked, asked)}"
    if all(device.name != chip for device in present):
        return [*present, absent(forced)]
    # Core looks for the name that was given, so a chip that is here answers to its other name.
    return [replace(d, name=forced) if d.name == chip else d for d in present]


def detect(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    amdsmi: Any | None = None,
) -> list[Device]:  # one record for equal chips, in HIP's order
    """The GPUs that HIP would offer in this environment.

    Args:
        root: what stands for `/`: sysfs and `/dev/kfd` are looked up below it.
        environment: where the variables are looked up that choose GPUs.
        amdsmi: a module like AMD's `amdsmi`, asked where sysfs has no KFD; None takes that one,
            and then the word of a torch that has started HIP already.

    Raises:
        DeviceError: there are GPUs, and the variables that choose some contradict each other.
    """
    gpus = _by_kfd(root, environment)
    if gpus is None:
        gpus = _by_amdsmi(amdsmi or _amdsmi())
    offered = _visible(gpus, environment) if gpus else _by_torch()
    records: dict[str, Device] = {}
    for index, seen in enumerate(offered):
        if seen.arch in DISPLAY_ONLY:
            continue
        record = _record(seen, index)
        first = records.get(record.name, record)
        count = int(first.facts.get("count") or 0) + 1
        records[record.name] = replace(first, facts={**first.facts, "count": count})
    return list(records.values())


# --- what the driver says ----------------------------------------------------------------------


def _by_kfd(root: Path, environment: Mapping[str, str]) -> list[Seen] | None:
    """The GPUs in sysfs, by node; None where this kernel has no KFD."""
    folder = root / _NODES
    if not folder.is_dir():
        return None
    if not (root / "dev/kfd").exists():
        return []  # a container sees the host's sysfs, and can use no GPU without this
    nodes = sorted((n for n in folder.iterdir() if n.name.isdigit()), key=lambda n: int(n.name))
    seen = [_node(node) for node in nodes]
    override = environment.get("HSA_OVERRIDE_GFX_VERSION")
    gpus = [gpu for gpu in seen if gpu is not None]
    if not override or not gpus:
        return gpus
    return [replace(gpu, arch=_overridden(override)) for gpu in gpus]


def _node(node: Path) -> Seen | None:
    """A GPU's node; None for a processor's, and for a GPU that this user may not see."""
    told = _properties(node / "properties")
    version, simds = told.get("gfx_target_version", 0), told.get("simd_count", 0)
    if not version or not simds:
        return None
    unique = told.get("unique_id", 0)
    return Seen(
        arch=_arch(version // 10000, version // 100 % 100, version % 100),
        pci_device=told.get("device_id"),
        compute_units=simds // max(1, told.get("simd_per_cu", 0)),
        memory_bytes=_memory(node) or None,
        wave_size=told.get("wave_front_size") or None,
        lds_bytes=told.get("lds_size_in_kb", 0) * 1024 or None,
        unique_id=f"{unique:016x}" if unique else "",
    )


def _arch(major: int, minor: int, step: int) -> str:
    return f"gfx{major}{minor:x}{step:x}"


def _overridden(version: str) -> str:
    parts = version.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise DeviceError(
            f"HSA_OVERRIDE_GFX_VERSION is {version!r}: expected major.minor.step, e.g. 11.0.0; "
            "mend it or unset it"
        )
    return _arch(*map(int, parts))


def _properties(file: Path) -> dict[str, int]:
    """The lines `name number` of a file; none where it is gone, or not for this user's eyes."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _memory(node: Path) -> int:
    banks = (_properties(bank / "properties") for bank in _folders(node / "mem_banks"))
    return sum(b.get("size_in_bytes", 0) for b in banks if b.get("heap_type") in _LOCAL_HEAPS)


def _folders(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # gone, or not for this user's eyes
        return []


def _amdsmi() -> Any | None:
    """AMD's library, if this machine has it in a state to be imported."""
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError):  # it looks for its shared object by a variable's path
        return None


def _by_amdsmi(library: Any | None) -> list[Seen]:
    if library is None:
        return []
    try:
        library.amdsmi_init()
    except library.AmdSmiException:  # no driver
        return []
    try:
        return [_handle(library, handle) for handle in library.amdsmi_get_processor_handles()]
    finally:
        library.amdsmi_shut_down()


def _handle(library: Any, handle: Any) -> Seen:
    asic = library.amdsmi_get_gpu_asic_info(handle)
    memory = library.amdsmi_get_gpu_memory_total(handle, library.AmdSmiMemoryType.VRAM)
    units = asic.get("num_compute_units")
    return Seen(
        arch=_without_suffix(str(asic["target_graphics_version"])),
        pci_device=int(str(asic["device_id"]), 16),
        compute_units=units if isinstance(units, int) else None,  # else "N/A"
        memory_bytes=memory or None,
        unique_id=str(asic.get("asic_serial", "")).lower().removeprefix("0x"),
    )


def _by_torch() -> Iterator[Seen]:
    """What torch says, where it has started HIP already; asking would start it elsewhere."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.hip is None or not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        told = torch.cuda.get_device_properties(index)
        yield Seen(
            arch=_without_suffix(told.gcnArchName),
            compute_units=told.multi_processor_count,
            memory_bytes=told.total_memory,
            wave_size=told.warp_size,
        )


def _without_suffix(arch: str) -> str:
    """`gfx942:sramecc+:xnack-` → `gfx942`."""
    return arch.partition(":")[0]


# --- what the environment leaves of it ---------------------------------------------------------


def _visible(gpus: Sequence[Seen], environment: Mapping[str, str]) -> list[Seen]:
    """What HIP offers: ROCR_VISIBLE_DEVICES chooses first, HIP_VISIBLE_DEVICES counts the rest.

    CUDA_VISIBLE_DEVICES is HIP's other name for its own.
    """
    rocr, hip, cuda = (environment.get(f"{n}_VISIBLE_DEVICES") for n in ("ROCR", "HIP", "CUDA"))
    if hip is not None and cuda is not None and hip != cuda:
        raise DeviceError(
            f"HIP_VISIBLE_DEVICES is {hip!r} and CUDA_VISIBLE_DEVICES {cuda!r}: they mean the "
            "same, so unset one of them or make them equal"
        )
    left = _chosen(gpus, rocr)
    wanted = cuda if hip is None else hip
    found = _chosen(left, wanted)
    if rocr is not None and wanted and len(found) < len(wanted.split(",")):
        raise DeviceError(
            f"ROCR_VISIBLE_DEVICES is {rocr!r} and leaves {len(left)} of {len(gpus)} GPUs, which "
            f"are then counted from 0; {'CUDA' if hip is None else 'HIP'}_VISIBLE_DEVICES is "
            f"{wanted!r} and names others: unset one of them"
        )
    return found


def _chosen(gpus: Sequence[Seen], wanted: str | None) -> list[Seen]:
    """The named ones, by index or `GPU-…`; from a name that means none on, HIP reads no further."""
    if wanted is None:
        return list(gpus)
    chosen: list[Seen] = []
    for entry in map(str.strip, wanted.split(",")):
        identity = entry.removeprefix("GPU-").lower()
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry != identity and (same := [g for g in gpus if g.unique_id == identity]):
            chosen += same
        else:
            break
    return chosen


# --- records -----------------------------------------------------------------------------------


def absent(name: str) -> Device:
    """The record of a chip or an architecture that is asked for by name, and not here.

    Raises:
        DeviceError: no table holds the name; lists those that there are.
    """
    asked = name.partition(":")[2]
    chip = CHIPS.get(ARCHES[asked].typical if asked in ARCHES else ALIASES.get(asked, asked))
    if chip is None:
        known = [f"{KIND}:{known}" for known in (*CHIPS, *ALIASES, *ARCHES)]
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        there = "there is no AMD GPU on this machine" if not asked else "no such chip is known"
        raise DeviceError(f"device {name!r}: {there}{hint}; name one of {', '.join(known)}")
    seen = Seen(arch=chip.arch, compute_units=chip.compute_units, memory_bytes=chip.memory_bytes)
    return replace(_record(seen, 0), name=name, present=False)


def _record(seen: Seen, index: int) -> Device:
    chip = chip_of(seen.arch, seen.pci_device, seen.compute_units)
    shared_memory = chip is not None and chip.memory_bytes is None
    return Device(
        name=f"{KIND}:{chip.name if chip else seen.arch}",
        kind=KIND,
        arch=seen.arch,
        # ROCm's torch calls its devices so, too.
        torch_device=f"cuda:{index}",
        # Of memory shared with the processor, the driver tells the part set aside at boot.
        memory_bytes=None if shared_memory else seen.memory_bytes,
        graph_capture=True,
        activate="polysilicon_amd.device:activate",
        facts=_facts(seen),
    )


def _facts(seen: Seen) -> dict[str, Any]:
    """What kernels want to know; of an architecture that no table holds, only what was seen."""
    arch = ARCHES.get(seen.arch)
    if arch is None:
        return {
            "compute_units": seen.compute_units,
            "wave_size": seen.wave_size,
            "shared_bytes": seen.lds_bytes,
            "family": "unknown",
            "matrix_unit": "none",
            "native_formats": "",
            "fp8": "none",
        }
    return {
        "compute_units": seen.compute_units,
        "wave_size": arch.wave_size,
        "shared_bytes": arch.lds_bytes,
        "family": arch.family,
        "matrix_unit": arch.matrix_unit,
        "native_formats": ",".join(arch.native_formats),
        "fp8": arch.fp8,
        "triton": "polysilicon_amd.compiled:triton",
    }


def activate() -> None:
    """Checks that torch can use the GPUs that the driver tells of, and numbers them alike.

    Raises:
        DeviceError: it can't; says what to install or to set.
    """
    import torch

    if torch.version.hip is None:
        raise DeviceError(
            f"torch {torch.__version__} is built without ROCm: install a ROCm build of it "
            "(https://pytorch.org/get-started/locally) to run on the GPU"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} can't use the GPU: may this user open /dev/kfd and "
            "/dev/dri (groups render and video)? See rocminfo"
        )
    for device in detect():
        told = torch.cuda.get_device_properties(device.torch_device).gcnArchName
        if _without_suffix(told) != device.arch:
            raise DeviceError(
                f"{device.name} is {device.arch} and torch's {device.torch_device} is {told}: "
                "choose one GPU with HIP_VISIBLE_DEVICES, so that both number them alike"
            )
