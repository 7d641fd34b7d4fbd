"""Finds plugins, decides which may run, and asks them; the only file that knows pluggy's manager.

Three checks, cheapest first: the API major in the entry-point group and the plugin's own
`Requires-Dist` on polysilicon before any of its code is imported; pluggy's validation after. Each
plugin is loaded and asked by itself, so that a broken one costs only itself.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pluggy

from polysilicon import hookspecs
from polysilicon.api import _asked_for, forced_device
from polysilicon.discovery import (
    API_MAJOR,
    CORE,
    Plugin,
    PluginStatus,
    Refused,
    core_version,
    installed,
    named,
    negotiate,
    refuse_same_names,
    switched_off,
)
from polysilicon.errors import DeviceError, PluginError
from polysilicon.notices import notice, strict
from polysilicon.records import Device, Kernel, Layout, Provided

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from polysilicon.records import Record


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What all plugins answered, stamped with origins; core's own answers come last.

    `layouts` and `kernels` are by device name.
    """

    plugins: tuple[PluginStatus, ...]
    devices: tuple[Provided[Device], ...]
    layouts: Mapping[str, tuple[Provided[Layout], ...]]
    kernels: Mapping[str, tuple[Provided[Kernel], ...]]


# --- loading -----------------------------------------------------------------------------------


def _load(manager: pluggy.PluginManager, plugin: Plugin) -> None:
    """Imports and registers one plugin; raises `Refused` with what went wrong."""
    row = plugin.status
    report = f"report this to the authors of {row.distribution}"
    try:
        module = importlib.import_module("polysilicon.defaults")
        if plugin.entry_point is not None:
            module = plugin.entry_point.load()
    except ImportError as error:  # most often a dependency that was removed, or never came
        remedy = f"pip install --upgrade {row.distribution}, or {report}"
        raise Refused("broken", f"importing it failed: {_short(error)}", remedy) from error
    except (Exception, SystemExit) as error:
        raise Refused("broken", f"importing it failed: {_short(error)}", report) from error
    _check_marks(module)
    try:
        manager.register(module, row.name)
        manager.check_pending()
    except Exception as error:
        if manager.has_plugin(row.name):
            manager.unregister(name=row.name)
        raise Refused(
            "broken",
            _validation_text(error),
            f"pip install --upgrade polysilicon {row.distribution}, or {report}",
        ) from error
    callers = manager.get_hookcallers(manager.get_plugin(row.name)) or []
    plugin.status = replace(row, hooks=tuple(sorted(caller.name for caller in callers)))
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is module and (
                implementation.hookwrapper or implementation.wrapper
            ):
                manager.unregister(name=row.name)
                raise Refused(
                    "broken",
                    f"{caller.name} is a wrapper: hooks that answer with records can't be",
                    report,
                )


def _check_marks(module: Any) -> None:
    """Raises `Refused` where a function isn't the hook that its author meant."""
    for attribute, value in vars(module).items():
        if not inspect.isfunction(value) or value.__module__ != module.__name__:
            continue
        mark = getattr(value, "polysilicon_impl", None)  # what pluggy's decorator leaves
        if mark is not None:
            hook = mark.get("specname") or attribute
            # An optional hook is for other cores: this one need not know it.
            if hook in _hook_names() or not mark["optionalhook"]:
                _check_hook(module, hook, value)
        elif attribute.startswith("polysilicon_"):
            raise Refused(
                "broken",
                f"{attribute} is not marked as a hook",
                f"put @hookimpl above it in the module {module.__name__}",
            )


def _check_hook(module: Any, hook: str, function: Any) -> None:
    there = _hook_names()
    if hook not in there:
        close = difflib.get_close_matches(hook, there, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise Refused(
            "broken",
            f"unknown hook {hook!r}{meant}: the hooks of plugin API {API_MAJOR} are "
            f"{', '.join(there)}",
            f"rename it in the module {module.__name__}, or pip install --upgrade polysilicon",
        )
    allowed = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    unknown = [name for name in inspect.signature(function).parameters if name not in allowed]
    if unknown:
        takes = f"only {', '.join(allowed)}" if allowed else "no argument"
        raise Refused(
            "broken",
            f"{hook} asks for the argument {unknown[0]!r}, and core gives that hook {takes}",
            f"mend its signature in the module {module.__name__}",
        )


def _validation_text(error: Exception) -> str:
    """pluggy's words without the module's path, and the hooks that there are."""
    text = "; ".join(line for line in str(error).splitlines() if line)
    text = re.sub(r" in plugin <module .*?>", "", text)
    return f"{text}; the hooks of plugin API {API_MAJOR} are {', '.join(_hook_names())}"


def _hook_names() -> list[str]:
    return sorted(name for name in vars(hookspecs) if name.startswith("polysilicon_"))


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# --- asking ------------------------------------------------------------------------------------


class _Asking:
    """Asks one hook of one plugin at a time, and remembers who failed."""

    def __init__(self, manager: pluggy.PluginManager, plugins: list[Plugin]) -> None:
        self._manager = manager
        self._plugins = plugins

    def ask(
        self, hook: str, kind: type[Record], **arguments: object
    ) -> list[tuple[Plugin, Provided[Record]]]:
        answers: list[tuple[Plugin, Provided[Record]]] = []
        for plugin in self._plugins:
            if not plugin.active:
                continue
            try:
                records = self._call(plugin, hook, kind, arguments)
            except Refused as why:
                if plugin.entry_point is None:
                    raise  # core's own plugin: a bug of ours, never hidden
                plugin.refuse(why)
            else:
                answers += [(plugin, Provided(record=r, origin=plugin.origin)) for r in records]
        return answers

    def _call(
        self, plugin: Plugin, hook: str, kind: type[Record], arguments: Mapping[str, object]
    ) -> list[Record]:
        report = f"report this to the authors of {plugin.status.distribution}"
        own = self._manager.get_plugin(plugin.status.name)
        others = [other for other in self._manager.get_plugins() if other is not own]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            records = [
                record
                for answer in caller(**arguments)
                for record in _iterated(answer, hook, kind, report)
            ]
        except DeviceError:
            if forced_device() is None:
                raise Refused("broken", f"{hook} raised a DeviceError unasked", report) from None
            raise  # the plugin says what is wrong with the name that the user gave
        except Refused:
            raise
        except (Exception, SystemExit) as error:
            said = f"{hook} raised {_short(error)}{_place(error, own)}"
            raise Refused("broken", said, report) from error
        names: set[str] = set()
        for record in records:
            if not isinstance(record, kind):
                came = type(record).__name__
                raise Refused("broken", f"{hook} returned {came}, expected {kind.__name__}", report)
            name = record.name  # type: ignore[attr-defined]  # all three kinds have one
            if name in names:
                raise Refused("broken", f"{hook} returned two records named {name!r}", report)
            names.add(name)
        return records


def _iterated(answer: Any, hook: str, kind: type[Record], report: str) -> Iterable[Record]:
    try:
        iter(answer)
    except TypeError:
        came = type(answer).__name__
        one = "a single " if isinstance(answer, kind) else ""
        raise Refused(
            "broken", f"{hook} returned {one}{came}, expected a list of {kind.__name__}", report
        ) from None
    records: Iterable[Record] = answer
    return records


def _place(error: BaseException, module: Any) -> str:
    """The plugin's own innermost line on the way to an error; empty where it has none."""
    package = module.__name__.partition(".")[0]
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            found = f" ({frame.f_code.co_filename}, line {line})"
    return found


def _refuse_conflicts(answers: Iterable[tuple[Plugin, Provided[Any]]]) -> None:
    """Two plugins with a record of one name: both are refused; against core, only the other."""
    by_name: dict[str, list[Plugin]] = {}
    for plugin, provided in answers:
        by_name.setdefault(provided.record.name, []).append(plugin)
    for name, owners in by_name.items():
        if len(owners) == 1:
            continue
        whose = " and ".join(str(owner.origin) for owner in owners)
        for owner in owners:
            if owner.entry_point is not None:
                owner.refuse(
                    Refused(
                        "broken",
                        f"the name {name!r} is provided by both {whose}",
                        f"turn one off: POLYSILICON_DISABLE_PLUGINS={owner.status.name}",
                    )
                )


def gather(absent: Iterable[str] = ()) -> Answers:
    """Finds, checks, loads and asks all plugins, now; `answers()` is the cached form.

    `absent` names further devices to ask for, as `POLYSILICON_DEVICE` would.
    """
    plugins = sorted(installed(), key=lambda p: (p.status.name, p.status.distribution))
    for plugin in plugins:
        if off := switched_off(plugin.status.name):
            plugin.refuse(off)
    refuse_same_names(plugins)
    manager = pluggy.PluginManager("polysilicon")
    manager.add_hookspecs(hookspecs)
    for plugin in filter(lambda plugin: plugin.active, plugins):
        try:
            negotiate(plugin)
            _load(manager, plugin)
        except Refused as why:
            plugin.refuse(why)
    row = PluginStatus(name=CORE, distribution="polysilicon", version=core_version() or "source")
    core = Plugin(row)
    _load(manager, core)
    plugins.append(core)
    return _ask_all(_Asking(manager, plugins), plugins, absent)


def _ask_devices(asking: _Asking, absent: Iterable[str]) -> list[tuple[Plugin, Provided[Device]]]:
    """The devices here and the one that the environment forces, then those asked for by name."""
    found = asking.ask("polysilicon_devices", Device)
    for name in absent:
        token = _asked_for.set(name)
        try:
            more = asking.ask("polysilicon_devices", Device)
        finally:
            _asked_for.reset(token)
        known = {provided.record.name for _, provided in found}
        found += [answer for answer in more if answer[1].record.name not in known]
    # Core's own cpu stays the last: the first device of a listing is the preferred one.
    return sorted(found, key=lambda answer: answer[0].entry_point is None)


def _ask_all(asking: _Asking, plugins: list[Plugin], absent: Iterable[str]) -> Answers:
    devices = _ask_devices(asking, absent)
    _refuse_conflicts(devices)
    layouts, kernels = {}, {}
    for plugin, provided in devices:
        if plugin.active:
            device = provided.record
            layouts[device.name] = asking.ask("polysilicon_layouts", Layout, device=device)
            kernels[device.name] = asking.ask("polysilicon_kernels", Kernel, device=device)
            _refuse_conflicts(layouts[device.name])
            _refuse_conflicts(kernels[device.name])
    # A plugin that failed late takes all of its earlier answers with it.
    kept = [provided for plugin, provided in devices if plugin.active]
    names = [provided.record.name for provided in kept]
    return Answers(
        plugins=tuple(plugin.status for plugin in plugins),
        devices=tuple(kept),
        layouts={n: tuple(p for owner, p in layouts[n] if owner.active) for n in names},
        kernels={n: tuple(p for owner, p in kernels[n] if owner.active) for n in names},
    )


#: Absent devices that were asked for by name in this process.
_absent: list[str] = []


@functools.cache
def answers() -> Answers:
    """What all plugins answered, asked once per process. `answers.cache_clear()` asks anew."""
    return gather(_absent)


def ask_for(name: str) -> None:
    """Asks the plugins anew, for the device `name` too; `answers()` then holds it if one knows it.

    Raises:
        DeviceError: the plugin of that kind knows no such chip.
    """
    if name in _absent:
        return
    _absent.append(name)
    answers.cache_clear()
    try:
        answers()
    except DeviceError:
        _absent.remove(name)
        raise


# --- what the user sees ------------------------------------------------------------------------


def plugins() -> tuple[PluginStatus, ...]:
    """Every installed plugin with its state (active, disabled, incompatible, broken) and reason.

    Example:
        >>> [row.name for row in plugins() if row.state == "active"][-1]
        'core'
    """
    return answers().plugins


def problem_text(row: PluginStatus) -> str:
    """What was found, what is needed and what to do, for a plugin that is not active."""
    said = f"{row.distribution} {row.version} was not loaded: {row.reason}."
    remedy = f" What to do: {row.remedy}." if row.remedy else ""
    return (
        f"{said}\nRunning without it.{remedy}\n(`polysilicon plugins` lists all plugins; "
        f"POLYSILICON_DISABLE_PLUGINS={row.name} hides this.)"
    )


def require(name: str) -> PluginStatus:
    """The row of an active plugin that was asked for by name.

    Raises:
        PluginError: it is not installed, or installed and not active; says why and what to do.
    """
    rows = plugins()
    same = [row for row in rows if row.name == name]
    for row in same:
        if row.state != "active":
            remedy = f" What to do: {row.remedy}." if row.remedy else ""
            raise PluginError(
                f"plugin {name!r} ({row.distribution} {row.version}) is {row.state}: "
                f"{row.reason}.{remedy}"
            )
    if not same:
        close = difflib.get_close_matches(name, [row.name for row in rows])
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        raise PluginError(
            f"there is no plugin {name!r} installed{hint}: installed are "
            f"{', '.join(row.name for row in rows)}; pip install polysilicon-{name}"
        )
    return same[0]


def checked() -> Answers:
    """The answers, after everything that was asked for by name is there and the rest was told."""
    for name in named(os.environ.get("POLYSILICON_PLUGINS", "")):
        require(name)
    found = answers()
    strict()  # a wrong value is told now, not by the first warning
    names = {"*", *(row.name for row in found.plugins)}
    for name in named(os.environ.get("POLYSILICON_DISABLE_PLUGINS", "")):
        if name not in names:
            notice(
                f"POLYSILICON_DISABLE_PLUGINS names {name!r}, which is not installed: "
                "`polysilicon plugins` lists what is",
                PluginError,
            )
    for row in found.plugins:
        if row.state in ("incompatible", "broken"):
            notice(problem_text(row), PluginError)
    return found
