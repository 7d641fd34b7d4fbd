"""Implements a hook of some later core, which this one may leave alone."""

from polysilicon.api import Device, hookimpl


@hookimpl
def polysilicon_devices():
    return [Device(name="later", kind="later")]


@hookimpl(optionalhook=True)
def polysilicon_meters(device):
    raise AssertionError("this core has no such hook")
