"""What Polysilicon asks: which devices are here, how tensors lie on them, which kernels there are.

Imports no torch and no toolchain: core imports this module for every listing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Device, Kernel, Layout, forced_device, hookimpl

from polysilicon_acme import device as detection
from polysilicon_acme.chips import SMALLEST_SCRATCH
from polysilicon_acme.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polysilicon.api import Problem


@hookimpl
def polysilicon_devices() -> Iterable[Device]:
    """The Acme chips of this machine, and a forced one."""
    return detection.devices(forced_device())


@hookimpl
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """How linear weights lie; all else is plain."""
    return LAYOUTS if device.kind == detection.KIND else ()


def _row_fits(problem: Problem) -> str | None:
    """Why a row doesn't fit the scratchpad in float32, None where it does."""
    hidden = int(problem.fact("hidden") or 0)
    most = SMALLEST_SCRATCH // 4
    return None if hidden <= most else f"hidden size {hidden}: a row of more than {most} won't fit"


KERNELS = (
    Kernel(
        op="rms_norm",
        name="rms_norm.acme",
        target="polysilicon_acme.kernels.rms_norm:rms_norm",
        device=detection.KIND,
        supports=_row_fits,
        offline="polysilicon_acme.compiled:rms_norm",
    ),
)


@hookimpl
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """All kernels, whatever the device: core compares, and `explain` says why not."""
    del device
    return KERNELS
