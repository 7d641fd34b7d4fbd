"""Raises in a hook, half way through its answer."""

from polysilicon.api import Device, Kernel, hookimpl


@hookimpl
def polysilicon_devices():
    return [Device(name="raiser", kind="raiser")]


@hookimpl
def polysilicon_kernels(device):
    yield Kernel(op="linear", name="linear.raiser", target="acme_raises:linear", device="raiser")
    raise OSError("driver is asleep")
