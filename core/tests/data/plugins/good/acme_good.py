"""A plugin that is as it should be: a device, a layout, kernels; its kernels run anywhere."""

from __future__ import annotations

from polysilicon.api import Device, DeviceError, Kernel, Layout, forced_device, hookimpl

NAMES = {"acme:x1": "a1", "acme:x2": "a2"}
activations = []


@hookimpl
def polysilicon_devices():
    found = [Device(name="acme:x1", kind="acme", arch="a1", activate="acme_good:activate")]
    if forced_device() == "acme:x2":
        found.append(Device(name="acme:x2", kind="acme", arch="a2", present=False))
    elif forced_device() == "acme:x0":
        raise DeviceError("acme knows no chip x0: there are acme:x1 and acme:x2")
    return found


@hookimpl
def polysilicon_layouts(device):
    if device.kind != "acme":
        return []
    return [
        Layout(
            name="acme.tiles",
            role="linear_weight",
            dims=("N/64", "K", "64"),
            pack="acme_good:pack",
            unpack="acme_good:unpack",
        )
    ]


@hookimpl
def polysilicon_kernels(device):
    yield Kernel(
        op="silu_and_mul",
        name="silu_and_mul.acme",
        target="acme_good:silu_and_mul",
        device="acme:a1",
        rank=5,
        note="measured on x1",
    )


def silu_and_mul(x):
    import torch

    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def pack(weight):
    return weight


def unpack(weight):
    return weight


def activate():
    activations.append("x1")
