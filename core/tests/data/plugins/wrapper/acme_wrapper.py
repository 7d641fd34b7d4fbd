"""Wraps a hook of records, which would let it change others' answers."""

from polysilicon.api import hookimpl


@hookimpl(wrapper=True)
def polysilicon_kernels(device):
    yield
    return []
