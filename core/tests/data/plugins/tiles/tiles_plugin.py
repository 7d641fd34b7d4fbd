"""A plugin whose linear takes its weight in tiles, and a second layout that nobody asks for."""

from __future__ import annotations

from polysilicon.api import Device, Kernel, Layout, hookimpl


@hookimpl
def polysilicon_devices():
    return [Device(name="tiles:t1", kind="tiles", arch="t1", simulated=True, compile_default=False)]


@hookimpl
def polysilicon_layouts(device):
    if device.kind != "tiles":
        return []
    return [
        Layout(
            name="tiles.weight",
            role="linear_weight",
            dims=("N/4", "K/8", "4", "8"),
            pack="tiles_kernels:pack",
            unpack="tiles_kernels:unpack",
        ),
        Layout(
            name="tiles.turned",
            role="linear_weight",
            dims=("K", "N"),
            pack="tiles_kernels:pack_turned",
            unpack="tiles_kernels:unpack_turned",
        ),
    ]


@hookimpl
def polysilicon_kernels(device):
    few = {"tokens": (1, 4), "rank": 2}
    for name, more in (("few", few), ("many", {"rank": 1})):
        yield Kernel(
            op="linear",
            name=f"linear.tiles_{name}",
            target=f"tiles_kernels:{name}",
            device="tiles",
            layouts={"weight": "tiles.weight"},
            form="opaque",
            fake="tiles_kernels:fake",
            **more,
        )
