"""Makes a record that does not hold together."""

from polysilicon.api import Kernel, hookimpl


@hookimpl
def polysilicon_kernels(device):
    return [Kernel(op="linear", name="linear.bad", target="acme_bad_record.linear")]
