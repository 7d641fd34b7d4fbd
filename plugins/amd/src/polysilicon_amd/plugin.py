"""The hooks that this plugin answers.

Imports no torch and no toolchain: core imports this module for every listing.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from polysilicon.api import Kernel, hookimpl
from polysilicon_amd import device as detection
from polysilicon_amd.kernels.linear_tiles import MOST_SIZE, TILES, workspace_bytes
from polysilicon_amd.layout import SHUFFLED, layouts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polysilicon.api import Device, Layout, Problem


@hookimpl
def polysilicon_devices() -> Iterable[Device]:
    """The GPUs that the kernel driver tells of, as HIP offers them, and one asked for by name."""
    return detection.devices()


@hookimpl
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """The first of each role is the usual one; the others are for kernels that name them."""
    return layouts(device) if device.kind == detection.KIND else []


@hookimpl
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """The kernels, for every device: core compares, and says what is for another."""
    ours = device.kind == detection.KIND and device.arch in TILES
    linear = "polysilicon_amd.kernels.linear"
    return [
        Kernel(
            op="linear",
            name="linear.amd_shuffled",
            target=f"{linear}:linear",
            device=f"{detection.KIND}:{device.arch}" if ours else detection.KIND,
            dtypes=frozenset({"bfloat16", "float16"}),
            supports=functools.partial(_why_not_shuffled, device.arch),
            form="opaque",
            fake=f"{linear}:linear_fake",
            layouts={"weight": SHUFFLED.name},
            workspace_bytes=workspace_bytes(device.arch) if ours else 0,
            offline=f"{linear}:offline" if ours else None,
            note="compiled offline and interpreter-checked, never run on hardware: "
            "proof-before-use decides on the chip",
        )
    ]


def _why_not_shuffled(arch: str, problem: Problem) -> str | None:
    """Why the kernel can't serve a problem, None where it can."""
    if arch not in TILES:
        return f"has tiles for {', '.join(TILES)}, none for {arch}"
    for role, stored in problem.formats.items():
        return f"multiplies what is stored as such; {role} is {stored.logical} {stored.dtype}"
    for fact in ("in", "out"):
        size = int(problem.fact(fact) or 0)
        if size > MOST_SIZE:
            return f"{fact} is {size}: more than {MOST_SIZE} need 64-bit offsets inside of a tile"
    return None
