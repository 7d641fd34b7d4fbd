"""Which device: the ones on this machine, the one in use, and no running on a forced one."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from polysilicon import selection
from polysilicon.api import forced_device
from polysilicon.errors import DeviceError
from polysilicon.plugins import ask_for, plugins, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polysilicon.records import Device
    from polysilicon.selection import Table

_in_use: Device | None = None
_activated: set[str] = set()


def devices() -> tuple[Device, ...]:
    """The devices that the plugins found; core's cpu is the last.

    Example:
        >>> devices()[-1].name
        'cpu'
    """
    return selection.current_table().devices


def find(name: str, table: Table | None = None) -> Device:
    """The device that `name` means: its name, kind (`acme`) or kind and arch (`acme:a1`).

    A chip that is not here, but that its plugin knows, comes as an absent device: it explains and
    compiles, and refuses to run.

    Raises:
        PluginError: the plugin of that name is installed, but not active.
        DeviceError: no such device; lists those that there are.
    """
    known = (table or selection.current_table()).devices
    found = _named(name, known)
    if found is not None and (table is not None or found.name == name or _real(found)):
        return found
    # A kind alone means a chip that is here; else its plugin says what it means.
    kind = name.partition(":")[0]
    if table is None and any(row.name == kind for row in plugins()):
        require(kind)
        ask_for(name)
        require(kind)  # it may have failed only now, when its own device was asked for
        selection.current_table.cache_clear()
        known = selection.current_table().devices
    if found := _named(name, known):
        return found
    names = [device.name for device in known]
    close = difflib.get_close_matches(name, names)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise DeviceError(
        f"there is no device {name!r} here{hint}: the devices are {', '.join(names)}; "
        f"another chip needs its plugin (`polysilicon plugins` lists what is installed)"
    )


def _named(name: str, known: Sequence[Device]) -> Device | None:
    """The device of that name, else the first of that kind or architecture, real ones before."""
    forms = [(d, (d.kind, f"{d.kind}:{d.arch}")) for d in known]
    exact = [device for device in known if device.name == name]
    close = [device for device, names in forms if name in names]
    return next(iter([*exact, *filter(_real, close), *close]), None)


def _real(device: Device) -> bool:
    return device.present and not device.simulated


def use(name: str) -> Device:
    """Makes a device the one that is meant where no other is named, and activates it.

    Activation is what a device's toolchain needs before its first tensor; only this does it, an
    import never.

    Example:
        >>> use("cpu").kind
        'cpu'

    Raises:
        DeviceError: there is no such device, or it cannot be activated.
        PluginError: the plugin of that name is installed, but not active.
    """
    global _in_use
    device = find(name)
    if device.activate is not None and device.name not in _activated and device.present:
        _run(device, device.activate)
        _activated.add(device.name)
    _in_use = device
    return device


def forget() -> None:
    """Undoes `use()`: the current device is again the one that the environment says."""
    global _in_use
    _in_use = None


def _run(device: Device, target: str) -> None:
    module, _, attribute = target.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)()
    except DeviceError:
        raise
    except Exception as error:
        raise DeviceError(
            f"device {device.name} could not be activated: {target} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def current() -> Device:
    """The device in use: of `use()`, else of `POLYSILICON_DEVICE`, else the first real one here."""
    if _in_use is not None:
        return _in_use
    if forced := forced_device():
        return find(forced)
    return next(device for device in devices() if device.present and not device.simulated)


def resolve(device: Device | str | None, table: Table | None = None) -> Device:
    """A device record from what callers give: a record, a name, or None (the current)."""
    if device is None:
        return current()
    return find(device, table) if isinstance(device, str) else device


def require_runnable(device: Device) -> Device:
    """The device again, if models can run on it.

    Raises:
        DeviceError: it was only asked for by name, or the fact `unusable` says what it lacks.
    """
    if device.present:
        return device
    present = ", ".join(other.name for other in devices() if other.present)
    if unusable := device.facts.get("unusable"):
        raise DeviceError(
            f"device {device.name} is on this machine and can't be used: {unusable}. Present and "
            f"usable are {present}"
        )
    raise DeviceError(
        f"device {device.name} is forced and not on this machine: explain and compile work, "
        f"running doesn't. Present are {present}: name one of them instead"
    )


def as_dict(device: Device) -> dict[str, Any]:
    """A device as JSON data."""
    return {
        "name": device.name,
        "kind": device.kind,
        "arch": device.arch,
        "torch_device": device.torch_device,
        "present": device.present,
        "simulated": device.simulated,
        "memory_bytes": device.memory_bytes,
        "facts": dict(device.facts),
    }
