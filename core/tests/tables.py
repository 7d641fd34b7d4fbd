"""Tables of fake devices and kernels for the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.records import Device, Kernel, Origin, Problem, Provided
from polysilicon.selection import build_table

if TYPE_CHECKING:
    from polysilicon.selection import Table

CPU = Device(name="cpu", kind="cpu", arch="x86_64")
CHIP = Device(name="acme:x1", kind="acme", arch="a1")
CORE = Origin(plugin="core", distribution="polysilicon", version="0.1")
ACME = Origin(plugin="acme", distribution="polysilicon-acme", version="1.2")

PORTABLE = Kernel(
    op="silu_and_mul", name="silu_and_mul.torch", target="polysilicon.ops.silu_and_mul:torch_kernel"
)


def kernel(function: str, **more: Any) -> Kernel:
    """A kernel of silu_and_mul whose target is that function of fake_kernels."""
    more.setdefault("name", f"silu_and_mul.{function}")
    return Kernel(op="silu_and_mul", target=f"fake_kernels:{function}", **more)


def opaque(function: str, **more: Any) -> Kernel:
    """The same as an opaque kernel."""
    return kernel(function, form="opaque", fake="fake_kernels:fake", **more)


def table(*kernels: Kernel, device: Device = CPU, portable: bool = True) -> Table:
    """A table of one device with these kernels of the acme plugin, and core's portable one last."""
    entries = [Provided(record=record, origin=ACME) for record in kernels]
    if portable:
        entries.append(Provided(record=PORTABLE, origin=CORE))
    return build_table(
        devices=[Provided(record=device, origin=CORE)],
        layouts={device.name: ()},
        kernels={device.name: entries},
    )


def problem(low: int = 1, high: int = 1 << 20, **facts: Any) -> Problem:
    """A problem of silu_and_mul for a range of token counts."""
    return Problem(op="silu_and_mul", dtype="float32", tokens=(low, high), facts=facts)
