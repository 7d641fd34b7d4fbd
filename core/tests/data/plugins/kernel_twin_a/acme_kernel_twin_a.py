"""Offers a kernel under a name that another plugin uses too."""

from polysilicon.api import Kernel, hookimpl


@hookimpl
def polysilicon_kernels(device):
    return [Kernel(op="linear", name="linear.twin", target="acme_kernel_twin_a:linear")]
