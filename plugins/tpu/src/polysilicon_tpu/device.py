"""Which TPUs are here: read from sysfs and /dev. No runtime is touched, no library loaded.

Asking libtpu or torch_tpu is no way to find out: without a TPU the one waits minutes for a
metadata server and the other ends the process. And libtpu on a machine only means that it can
compile: build machines have it.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polysilicon.api import Device, DeviceError
from polysilicon_tpu.chips import (
    CHIPS,
    LANES,
    PCI_TOO_OLD,
    PCI_VENDOR,
    SMEM_BYTES,
    SUBLANES,
    Chip,
    chip_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

KIND = "tpu"
#: What a TPU machine's environment may say beyond PCI; it refines, and never makes a TPU.
_REFINING = {"TPU_ACCELERATOR_TYPE": "accelerator_type", "TPU_WORKER_ID": "worker"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What detection saw.

    Attributes:
        state: `present`: a TPU with a device node; `aot_only`: none, but the
            compiler is installed; `absent`: neither.
        chips: architecture → number of usable chips.
        evidence: one sentence for each PCI device of Google's, or that there is none.
        installed: which of jax, libtpu and torch_tpu could be imported: a capability.
        refined: facts that the environment adds.
    """

    state: Literal["present", "aot_only", "absent"]
    chips: Mapping[str, int]
    evidence: tuple[str, ...]
    installed: tuple[str, ...]
    refined: Mapping[str, str]


def look(
    sys_root: Path = Path("/sys"),
    dev_root: Path = Path("/dev"),
    environment: Mapping[str, str] | None = None,
) -> Found:
    """Looks for TPUs.

    Args:
        sys_root: where sysfs is mounted.
        dev_root: where device nodes are.
        environment: variables that refine what was found; None for this process's.
    """
    chips: dict[str, int] = {}
    evidence = []
    for slot in sorted(_folders(sys_root / "bus" / "pci" / "devices")):
        if _text(slot / "vendor") != PCI_VENDOR:
            continue
        usable, said = _judge(slot, dev_root)
        evidence.append(said)
        if usable is not None:
            chips[usable.arch] = chips.get(usable.arch, 0) + 1
    if not evidence:
        evidence.append(f"no PCI device of vendor {PCI_VENDOR}")
    installed = tuple(name for name in ("jax", "libtpu", "torch_tpu") if find_spec(name))
    variables = os.environ if environment is None else environment
    refined = {fact: variables[name] for name, fact in _REFINING.items() if variables.get(name)}
    compiles = {"jax", "libtpu"} <= set(installed)
    return Found(
        state="present" if chips else "aot_only" if compiles else "absent",
        chips=chips,
        evidence=tuple(evidence),
        installed=installed,
        refined=refined if chips else {},
    )


def _judge(slot: Path, dev_root: Path) -> tuple[Chip | None, str]:
    """The usable TPU in a PCI slot of Google's, if it is one, and what was seen there."""
    device = _text(slot / "device")
    chip = next((chip for chip in CHIPS if chip.pci_device == device), None)
    seen = f"PCI {slot.name} {PCI_VENDOR}:{device}"
    if device == PCI_TOO_OLD:
        return None, f"{seen} is a TPU v2 or v3, which is not served"
    if chip is None:
        return None, f"{seen} is no TPU that this version knows"
    group = slot / "iommu_group"
    node = dev_root / "vfio" / group.resolve().name
    if _exists(group) and _exists(node):
        return chip, f"{seen} is a TPU {chip.arch}, usable through {node}"
    # Not /dev/accel/: that folder holds the neural processors of other vendors.
    if nodes := sorted(dev_root.glob("accel[0-9]*")):
        return chip, f"{seen} is a TPU {chip.arch}, usable through {nodes[0]}"
    return None, f"{seen} is a TPU {chip.arch}, but neither {node} nor {dev_root}/accel0 is here"


def _folders(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # no sysfs here, or not readable for this user
        return []


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way is closed to this user
        return False


def _text(file: Path) -> str:
    try:
        return file.read_text().strip().lower()
    except OSError:  # the device went away, or this user may not read it
        return ""


def devices(forced: str | None, found: Found | None = None) -> list[Device]:
    """The TPUs of this machine, and the one that `POLYSILICON_DEVICE` forces.

    Args:
        forced: e.g. `tpu`, `tpu:v6e`, `tpu:tpu7x`; may be of another kind.
        found: what `look()` saw; None to look now.

    Raises:
        DeviceError: the forced name is of our kind, and no TPU has it or none is here.
    """
    kind, _, name = (forced or "").lower().partition(":")
    found = found or look()
    here = [chip for chip in CHIPS if chip.arch in found.chips]
    asked = _asked(name, here, found) if kind == KIND and name else None
    if kind == KIND and not name and not here:
        raise DeviceError(f"there is no TPU here ({'; '.join(found.evidence)}): {_forms()}")
    records = [_record(f"{KIND}:{chip.arch}", chip, found) for chip in here if chip is not asked]
    if asked is None:
        return records
    return [_record(f"{KIND}:{name}", asked, found), *records]


def _asked(name: str, here: list[Chip], found: Found) -> Chip:
    chip = chip_of(name)
    if chip is None:
        known = [form for chip in CHIPS for form in chip.names]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {KIND}:{close[0]}?)" if close else ""
        raise DeviceError(f"there is no TPU {KIND}:{name}{hint}: {_forms()}")
    return chip


def _forms() -> str:
    forms = ", ".join(f"{KIND}:{chip.arch}" for chip in CHIPS)
    return f"set POLYSILICON_DEVICE to one of {forms} to explain and compile for a TPU"


def _record(name: str, chip: Chip, found: Found) -> Device:
    present = chip.arch in found.chips
    return Device(
        name=name,
        kind=KIND,
        arch=chip.arch,
        torch_device=KIND,
        present=present,
        memory_bytes=chip.memory_bytes,
        # TorchTPU is eager first, and nothing of ours was ever compiled on a TPU.
        compile_default=False,
        compile_backend="tpu",
        activate="polysilicon_tpu.runtime:activate",
        facts={
            "state": found.state,
            "evidence": "; ".join(found.evidence),
            "chips": found.chips.get(chip.arch, 0),
            "devices_per_chip": chip.devices_per_chip,
            "cores": chip.cores,
            "memory_bytes_per_second": chip.memory_bytes_per_second,
            "vmem_bytes": chip.vmem_bytes,
            "scoped_vmem_bytes": chip.scoped_vmem_bytes,
            "smem_bytes": SMEM_BYTES,
            "lanes": LANES,
            "sublanes": SUBLANES,
            "mxu": chip.mxu,
            "mxus": chip.mxus,
            "matrix_unit": f"mxu {chip.mxu}x{chip.mxu}",
            "native_formats": ",".join(chip.native_formats),
            "topology": chip.topology,
            **(found.refined if present else {}),
        },
    )
