"""The hooks that this plugin answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Layout, hookimpl
from polysilicon_nvidia import device as detection
from polysilicon_nvidia.kernels import kernels

if TYPE_CHECKING:
    from polysilicon.api import Device, Kernel

_NHD = ("blocks", "tokens", "heads", "head_size")
_HND = ("blocks", "heads", "tokens", "head_size")
_FP8 = "float8_e4m3fn float8_e5m2"


@hookimpl
def polysilicon_devices() -> list[Device]:
    """The GPUs that NVML tells of, as CUDA offers them, and the one that is asked for by name."""
    return detection.devices()


@hookimpl
def polysilicon_layouts(device: Device) -> list[Layout]:
    """The first of each role is the usual one; the others are for kernels that name them."""
    if device.kind != detection.KIND:
        return []
    blocks = [
        # Pages of 64 and 128 tokens are what one bulk tensor copy can fetch as a key block.
        Layout(name=name, role="kv_block", dims=dims, facts={"block_size": size})
        for name, dims, size in (
            ("nvidia.kv_nhd", _NHD, 16),
            ("nvidia.kv_hnd", _HND, 16),
            ("nvidia.kv_nhd_64", _NHD, 64),
            ("nvidia.kv_hnd_64", _HND, 64),
            ("nvidia.kv_nhd_128", _NHD, 128),
            ("nvidia.kv_hnd_128", _HND, 128),
        )
    ]
    return [*blocks, Layout(name="nvidia.weight", role="linear_weight"), *_fp8_weights(device)]


def _fp8_weights(device: Device) -> list[Layout]:
    """Where the matrix unit multiplies fp8: rows padded to what its operands are made of."""
    if "float8_e4m3fn" not in str(device.facts.get("native_formats", "")):
        return []
    return [
        Layout(
            name=f"nvidia.{name}",
            role="linear_weight",
            dims=("N", "K"),
            pack=f"polysilicon_nvidia.layout:pack_{name}",
            unpack=f"polysilicon_nvidia.layout:unpack_{name}",
            facts={"dtypes": _FP8, "multiple": multiple},
        )
        for name, multiple in (("scaled_mm", 16), ("scale_blocks", 128))
    ]


@hookimpl
def polysilicon_kernels(device: Device) -> list[Kernel]:
    """The kernels, for every device: core compares, and says what is for another."""
    return kernels(device)
