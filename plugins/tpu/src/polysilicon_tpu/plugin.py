"""What Polysilicon asks: which TPUs are here, how tensors lie on them, which kernels there are.

Imports no torch and no jax: core imports this module for every listing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Device, Kernel, Layout, forced_device, hookimpl
from polysilicon_tpu import blocks, runtime
from polysilicon_tpu import device as detection
from polysilicon_tpu.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polysilicon.api import Problem


@hookimpl
def polysilicon_devices() -> Iterable[Device]:
    """The TPUs of this machine, and a forced one."""
    return detection.devices(forced_device())


@hookimpl
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """The compiler's tiles for every role, and two forms of a key/value cache."""
    return LAYOUTS if device.kind == detection.KIND else ()


_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def _row_wise(problem: Problem) -> str | None:
    """Why a row-wise Pallas kernel can't serve a problem here; None where it can."""
    hidden = int(problem.fact("hidden") or 0)
    return blocks.too_wide(hidden, _ITEMSIZE[problem.dtype]) or runtime.why_not()


KERNELS = (
    Kernel(
        op="rms_norm",
        name="rms_norm.tpu_pallas",
        target="polysilicon_tpu.kernels.rms_norm:rms_norm",
        device=detection.KIND,
        dtypes=frozenset(_ITEMSIZE),
        supports=_row_wise,
        form="opaque",
        fake="polysilicon_tpu.kernels.rms_norm:fake",
        offline="polysilicon_tpu.kernels.rms_norm:offline",
        note=(
            "for eager use: one launch where PyTorch needs six; in a compiled graph XLA fuses the "
            "portable norm. Never run on a TPU"
        ),
    ),
)


@hookimpl
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """All kernels, whatever the device: core compares, and `explain` says why not."""
    del device
    return KERNELS
