"""Asks for an argument that this core does not pass."""

from polysilicon.api import hookimpl


@hookimpl
def polysilicon_kernels(device, model):
    return []
