"""What is tested: a plugin, one device of it, and the records that the plugin gives for it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polysilicon import choosing, selection
from polysilicon.calling import load_target
from polysilicon.devices import find
from polysilicon.errors import PluginError
from polysilicon.plugins import gather
from polysilicon.testing.findings import gaps_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from polysilicon.discovery import PluginStatus
    from polysilicon.records import Device, Kernel, Layout, Problem
    from polysilicon.selection import Table


class DeviceUnderTest:
    """What a vendor states once, and each suite inherits.

    Attributes:
        plugin: name of the plugin's entry point.
        device: the device to test, as `POLYSILICON_DEVICE` names it; None for the plugin's first.
        run_on: torch device on which the kernels run where that isn't the device's own: `cpu` for
            a kernel language's interpreter. Without it, what needs an absent device is skipped.
        environment: variables that are set while the plugin is asked and its kernels run, e.g.
            `{"TRITON_INTERPRET": "1"}`.
        problems: shapes that matter to the vendor's models, on which the kernels run too.
        gaps: what is known to fail → why. A key is a name and details in brackets:
            `rms_norm`, `rms_norm.acme[bfloat16]`, `rms_norm.acme[bfloat16, tokens 7]`,
            `RMSNorm[compiled]`, `plugin[floor and ceiling]`. A gap that passes fails.
    """

    plugin: ClassVar[str] = ""
    device: ClassVar[str | None] = None
    run_on: ClassVar[str | None] = None
    environment: ClassVar[Mapping[str, str]] = {}
    problems: ClassVar[Sequence[Problem]] = ()
    gaps: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        try:
            gaps_of(cls.gaps)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A device under test, looked up: the records, and where its kernels can run.

    `why_not` says why they can't run here; then `torch_device` is of no use.
    """

    row: PluginStatus
    table: Table
    device: Device | None
    torch_device: str
    why_not: str

    @property
    def how(self) -> Literal["device", "simulator", "interpreter", "not run"]:
        """What the kernels run on: results of anything but the device are labelled so."""
        if self.device is None or self.why_not:
            return "not run"
        if self.device.simulated:
            return "simulator"
        on_it = self.device.present and self.torch_device == self.device.torch_device
        return "device" if on_it else "interpreter"

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The plugin's own kernels that serve the device."""
        if self.device is None:
            return ()
        return tuple(
            entry.record
            for entry in self.table.kernels[self.device.name]
            if entry.origin.plugin == self.row.name
            and choosing.specificity(entry.record, self.device) is not None
        )

    @property
    def all_kernels(self) -> tuple[Kernel, ...]:
        """The plugin's own kernels, asked of every device: those for other devices, too."""
        return tuple(
            entry.record
            for entries in self.table.kernels.values()
            for entry in entries
            if entry.origin.plugin == self.row.name
        )

    @property
    def own_devices(self) -> tuple[Device, ...]:
        """The devices that the plugin found, and the one that is forced."""
        provided = self.table.provided_devices
        return tuple(p.record for p in provided if p.origin.plugin == self.row.name)

    @property
    def offered(self) -> dict[str, Layout]:
        """Every layout on the device by name, core's too: what a kernel may ask for."""
        return {} if self.device is None else self.table.offered(self.device)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The plugin's own layouts on the device."""
        if self.device is None:
            return ()
        entries = self.table.layouts[self.device.name]
        return tuple(entry.record for entry in entries if entry.origin.plugin == self.row.name)


@contextlib.contextmanager
def environment(under_test: type[DeviceUnderTest]) -> Iterator[None]:
    """The variables that a device under test asks for, and its device forced, for a while."""
    wanted = dict(under_test.environment)
    if under_test.device is not None:
        wanted["POLYSILICON_DEVICE"] = under_test.device
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_subjects: dict[type[DeviceUnderTest], Subject] = {}


def subject(under_test: type[DeviceUnderTest]) -> Subject:
    """The plugin and device under test; the plugins are asked once a class.

    Raises:
        PluginError: the plugin is not named, not installed or not active.
        DeviceError: there is no such device.
    """
    if under_test not in _subjects:
        _subjects[under_test] = _looked_up(under_test)
    return _subjects[under_test]


def _looked_up(under_test: type[DeviceUnderTest]) -> Subject:
    if not under_test.plugin:
        raise PluginError(f"{under_test.__name__} does not say which plugin it tests: plugin = '…'")
    with environment(under_test):
        answers = gather()
        table = selection.build_table(
            devices=answers.devices, layouts=answers.layouts, kernels=answers.kernels
        )
        row = _active(under_test.plugin, answers.plugins)
        device = _device(under_test, table)
        why_not = _why_not(under_test, device)
        if device is not None and device.present and device.activate and not why_not:
            load_target(device.activate)()
    own = device.torch_device if device is not None else "cpu"
    return Subject(
        row=row,
        table=table,
        device=device,
        torch_device=under_test.run_on or own,
        why_not=why_not,
    )


def _active(name: str, rows: Sequence[PluginStatus]) -> PluginStatus:
    for row in rows:
        if row.name == name and row.state == "active":
            return row
        if row.name == name:
            remedy = f". What to do: {row.remedy}" if row.remedy else ""
            raise PluginError(f"plugin {name!r} is {row.state}: {row.reason}{remedy}")
    raise PluginError(
        f"plugin {name!r} is not installed: installed are {', '.join(row.name for row in rows)}; "
        "pip install -e its folder first"
    )


def _device(under_test: type[DeviceUnderTest], table: Table) -> Device | None:
    if under_test.device is not None:
        return find(under_test.device, table)
    for provided in table.provided_devices:
        if provided.origin.plugin == under_test.plugin:
            return provided.record
    return None


def _why_not(under_test: type[DeviceUnderTest], device: Device | None) -> str:
    if device is None:
        return (
            f"plugin {under_test.plugin} finds no device here; device = '…' forces one, and "
            "run_on = 'cpu' runs its kernels in an interpreter"
        )
    if not device.present and under_test.run_on is None:
        return f"{device.name} is not on this machine, and run_on names no interpreter's device"
    return ""
