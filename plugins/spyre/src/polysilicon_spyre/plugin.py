"""What Polysilicon asks: which devices are here, how tensors lie on them, which kernels there are.

Imports no torch and no toolchain: core imports this module for every listing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Device, Kernel, Layout, forced_device, hookimpl
from polysilicon_spyre import device as detection
from polysilicon_spyre.chips import STORED
from polysilicon_spyre.division import span_split, span_text
from polysilicon_spyre.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polysilicon.api import Problem


@hookimpl
def polysilicon_devices() -> Iterable[Device]:
    """The Spyre cards of this machine, and a forced one or the simulator."""
    return detection.devices(forced_device())


@hookimpl
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """Sticks; for the KV cache an order of its dims and a block of 64 tokens."""
    return LAYOUTS if device.kind == detection.KIND else ()


def _weight_spans(problem: Problem) -> str | None:
    """Why no core could reach its part of the weight, None where each can."""
    columns = -(-int(problem.fact("out") or 0) // STORED[problem.dtype].elems_per_stick)
    depth = int(problem.fact("in") or 0)
    return span_text(columns, depth) if span_split(columns, depth) is None else None


_DTYPES = frozenset({"float32", "float16", "bfloat16"})
_SIMULATED = "simulated on the CPU: stick-tiled memory, cut over cores; says nothing of speed"

#: For the simulator alone: on a card, torch_spyre lays out and computes.
KERNELS = (
    Kernel(
        op="linear",
        name="linear.spyre_sticks",
        target="polysilicon_spyre.kernels.linear:linear",
        device=detection.SIMULATOR,
        dtypes=_DTYPES,
        supports=_weight_spans,
        form="opaque",
        fake="polysilicon_spyre.kernels.linear:fake",
        layouts={"weight": "spyre.weight_sticks"},
        offline="polysilicon_spyre.compiled:linear",
        note=_SIMULATED,
    ),
    Kernel(
        op="rms_norm",
        name="rms_norm.spyre_sticks",
        target="polysilicon_spyre.kernels.rms_norm:rms_norm",
        device=detection.SIMULATOR,
        dtypes=_DTYPES,
        form="opaque",
        fake="polysilicon_spyre.kernels.rms_norm:fake",
        note=_SIMULATED,
    ),
)


@hookimpl
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """All kernels, whatever the device: core compares, and `explain` says why not."""
    del device
    return KERNELS
