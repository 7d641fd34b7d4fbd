"""The hooks: three questions that core asks every plugin. Declarations only, no logic.

A hook answers with records and does nothing else. Core asks each plugin by itself, once per
process, before anything is built; it validates the answers, stamps them with their origin and
freezes them into a table. Nothing here is ever called while a model runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polysilicon.records import Device, Kernel, Layout

hookspec = pluggy.HookspecMarker("polysilicon")


@hookspec
def polysilicon_devices() -> Iterable[Device]:
    """Which devices of this plugin's kind are on this machine?

    When: once per process, when the first table is built (`polysilicon.devices()`, `use()`,
    `prepare()`, `explain()`, the engine), and by every listing of the command line.

    Must take less than 50 ms, create no device context, import no toolchain at module level, and
    return nothing (not raise) where the chip is absent. Equal chips are one record. When
    `polysilicon.api.forced_device()` names a device of this plugin's kind that is absent, the
    answer also holds a record for it with `present=False`: it explains and compiles, and core
    refuses to run on it. Where the name is of this plugin's kind and no chip that it knows, raise
    `DeviceError` with the names that there are: core hands it to the user.

    Returns:
        Device records, the preferred one first. `None` or an empty list means none.

    Example:
        ```python
        @hookimpl
        def polysilicon_devices():
            name = read_chip_name()  # e.g. from sysfs; never through a runtime that makes a context
            if name is None:
                return []
            return [Device(name=f"acme:{name}", kind="acme", arch="a1", torch_device="acme:0")]
        ```

    Added in version 0.1.
    """
    raise NotImplementedError  # a declaration: pluggy calls the plugins, never this


@hookspec
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """How do tensors of each role lie in this device's memory?

    When: once per process and device, after `polysilicon_devices`. Asked for every device of every
    plugin, so look at `device.kind` first.

    Args:
        device: one of the records that some plugin returned from `polysilicon_devices`.

    Returns:
        Layout records of the roles `linear_weight`, `expert_weight`, `kv_block`, `activation` and
        `embedding`, any number of each, with different names. The first `kv_block` is the one in
        which the engine's cache lies; a role that no plugin answers uses core's plain layout. A
        weight is packed into a layout only where a kernel asks for that layout by name in
        `Kernel.layouts`, and then in `prepare()`, once; whoever reads the weight still sees its
        logical values.

    Example:
        ```python
        @hookimpl
        def polysilicon_layouts(device):
            if device.kind != "acme":
                return []
            return [
                Layout(
                    name="acme.weight_tiles",
                    role="linear_weight",
                    dims=("N/64", "K/32", "64", "32"),
                    pack="polysilicon_acme.layout:pack",
                    unpack="polysilicon_acme.layout:unpack",
                )
            ]
        ```

    Added in version 0.1.
    """
    raise NotImplementedError  # a declaration: pluggy calls the plugins, never this


@hookspec
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """Which kernels does this plugin offer on this device?

    When: once per process and device, after `polysilicon_devices`. Returning all of the plugin's
    kernels for every device is welcome: core compares `Kernel.device` with the device, and
    `explain()` can then say "is for acme:a1, this is cpu".

    Args:
        device: one of the records that some plugin returned from `polysilicon_devices`.

    Returns:
        Kernel records. Targets are lazy: a kernel's module is imported only when it is bound.

        One that takes an argument packed names its layout: with
        `layouts={"weight": "acme.weight_tiles"}` its callable (and `fake`) gets the physical tensor
        as `weight`, and the logical shape after the op's own arguments, as `weight_shape`. An
        argument lies in one layout for all token counts: the kernel that goes first decides, others
        that take it otherwise are set apart, and where those that are left don't serve all token
        counts, the next choice is made. `Op.roles` says which arguments can be packed.

    Example:
        ```python
        def even_hidden(problem):
            return None if problem.fact("hidden", 0) % 2 == 0 else "hidden size is odd"


        @hookimpl
        def polysilicon_kernels(device):
            return [
                Kernel(
                    op="rms_norm",
                    name="rms_norm.acme",
                    target="polysilicon_acme.kernels.rms_norm:rms_norm",
                    device="acme:a1",
                    dtypes=frozenset({"bfloat16"}),
                    supports=even_hidden,
                    form="opaque",
                    fake="polysilicon_acme.kernels.rms_norm:fake",
                )
            ]
        ```

    Added in version 0.1.
    """
    raise NotImplementedError  # a declaration: pluggy calls the plugins, never this
