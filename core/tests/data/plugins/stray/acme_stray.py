"""Kernels for devices that do not exist: a typo, and a kind that its device does not have."""

from __future__ import annotations

from polysilicon.api import Device, Kernel, hookimpl


@hookimpl
def polysilicon_devices():
    return [Device(name="strays:s1", kind="strays", arch="s1")]


@hookimpl
def polysilicon_kernels(device):
    target = "acme_stray:kernel"
    return [
        Kernel(op="activation", name="activation.stray", target=target, device="qark"),
        Kernel(op="silu_and_mul", name="silu_and_mul.stray", target=target, device="stray"),
    ]


def kernel(x):
    return x
