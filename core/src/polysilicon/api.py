"""All that a plugin author imports; everything else in `polysilicon` is core's own business.

A plugin is a distribution with an entry point in the group `polysilicon.plugins.v1` that names a
module, and in that module functions marked with `hookimpl` that answer the hooks of
`polysilicon.hookspecs` (docs/hooks.md). Importing this module imports no torch.

Example:
    ```python
    from polysilicon.api import Device, hookimpl

    @hookimpl
    def polysilicon_devices():
        return [Device(name="acme", kind="acme")]
    ```
"""

from __future__ import annotations

import importlib
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import pluggy

from polysilicon import formats
from polysilicon.errors import (
    DeviceError,
    KernelError,
    LayoutError,
    PolysiliconError,
    RecordError,
    ToolchainError,
)
from polysilicon.records import DTYPES, Compiled, Device, Format, Kernel, Layout, Origin, Problem

if TYPE_CHECKING:
    from polysilicon.layouts import Tiled
    from polysilicon.loading import LayerShape, model_shapes
    from polysilicon.offline.triton import CompiledTriton, compile_triton
    from polysilicon.opaque import register_opaque
    from polysilicon.ops.contract import Op, Sample, tolerance
    from polysilicon.packed import Packed, pack

__all__ = [
    "DTYPES",
    "Compiled",
    "CompiledTriton",
    "Device",
    "DeviceError",
    "Format",
    "Kernel",
    "KernelError",
    "LayerShape",
    "Layout",
    "LayoutError",
    "Op",
    "Origin",
    "Packed",
    "PolysiliconError",
    "Problem",
    "RecordError",
    "Sample",
    "Tiled",
    "ToolchainError",
    "compile_triton",
    "forced_device",
    "formats",
    "hookimpl",
    "model_shapes",
    "pack",
    "register_opaque",
    "tolerance",
]

hookimpl = pluggy.HookimplMarker("polysilicon")

#: Names that need torch or a model's config, imported at first use.
_LAZY = {
    "CompiledTriton": "polysilicon.offline.triton",
    "LayerShape": "polysilicon.loading",
    "Op": "polysilicon.ops.contract",
    "Packed": "polysilicon.packed",
    "Sample": "polysilicon.ops.contract",
    "Tiled": "polysilicon.layouts",
    "compile_triton": "polysilicon.offline.triton",
    "model_shapes": "polysilicon.loading",
    "pack": "polysilicon.packed",
    "register_opaque": "polysilicon.opaque",
    "tolerance": "polysilicon.ops.contract",
}


#: Set while core asks for a device by a name that somebody gave, instead of the environment's.
_asked_for: ContextVar[str | None] = ContextVar("polysilicon_asked_for", default=None)


def forced_device() -> str | None:
    """The device that is asked for by name, present or not, e.g. `acme:a1`; None where none is.

    `POLYSILICON_DEVICE` asks for one, and so does naming an absent chip to `explain` or `compile`.
    """
    return _asked_for.get() or os.environ.get("POLYSILICON_DEVICE") or None


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polysilicon.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
