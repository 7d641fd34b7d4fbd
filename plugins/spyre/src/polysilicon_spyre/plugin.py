"""What Polysilicon asks: which devices are here, how tensors lie on them, which kernels there are.

Imports no torch and no toolchain: core imports this module for every listing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Device, Kernel, Layout, forced_device, hookimpl
from polysilicon_spyre import device as detection
from polysilicon_spyre.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def polysilicon_devices() -> Iterable[Device]:
    """The Spyre cards of this machine, and a forced one or the simulator."""
    return detection.devices(forced_device())


@hookimpl
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """Sticks; for the KV cache an order of its dims and a block of 64 tokens."""
    return LAYOUTS if device.kind == detection.KIND else ()


@hookimpl
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """All kernels, whatever the device: core compares, and `explain` says why not."""
    del device
    return ()
