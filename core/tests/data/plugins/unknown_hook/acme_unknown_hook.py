"""Implements a hook that this core does not have."""

from polysilicon.api import Device, hookimpl


@hookimpl
def polysilicon_devices():
    return [Device(name="unseen", kind="unseen")]


@hookimpl
def polysilicon_kernles(device):
    return []
