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
from dataclasses import dataclass, replace
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distributions,
    version,
)
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from polysilicon import hookspecs
from polysilicon.errors import PluginError
from polysilicon.notices import notice
from polysilicon.records import Device, Kernel, Layout, Origin, Provided

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from polysilicon.records import Record

API_MAJOR = 1
GROUP = "polysilicon.plugins.v"
CORE = "core"

State = Literal["active", "disabled", "incompatible", "broken"]


@dataclass(frozen=True, kw_only=True)
class PluginStatus:
    """One row of the plugin listing. `remedy` says what to do where the state isn't active."""

    name: str
    distribution: str
    version: str
    state: State = "active"
    reason: str = ""
    remedy: str = ""
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What all plugins answered, stamped with origins; core's own answers come last.

    `layouts` and `kernels` are by device name.
    """

    plugins: tuple[PluginStatus, ...]
    devices: tuple[Provided[Device], ...]
    layouts: Mapping[str, tuple[Provided[Layout], ...]]
    kernels: Mapping[str, tuple[Provided[Kernel], ...]]


class _Refused(Exception):
    """A plugin cannot be used: carries the row's new state, reason and remedy."""

    def __init__(self, state: State, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.remedy = remedy


@dataclass
class _Plugin:
    """One plugin on its way from an entry point to its answers."""

    status: PluginStatus
    major: int = API_MAJOR
    entry_point: EntryPoint | None = None  # None for core's own plugin
    distribution: Distribution | None = None

    @property
    def origin(self) -> Origin:
        row = self.status
        return Origin(plugin=row.name, distribution=row.distribution, version=row.version)

    @property
    def active(self) -> bool:
        return self.status.state == "active"

    def refuse(self, why: _Refused) -> None:
        self.status = replace(self.status, state=why.state, reason=why.reason, remedy=why.remedy)


def core_version() -> str:
    """The installed version of core; empty where it runs from a source tree."""
    try:
        return version("polysilicon")
    except PackageNotFoundError:
        return ""


# --- discovery and negotiation: nothing of a plugin is imported here ---------------------------


def _installed() -> Iterator[_Plugin]:
    seen: set[tuple[str, str]] = set()
    for distribution in distributions():
        text = distribution.read_text("entry_points.txt")
        if not text or GROUP not in text:  # spares parsing the metadata of everything installed
            continue
        name, found = distribution.metadata["Name"], distribution.version
        for entry_point in distribution.entry_points:
            key = (canonicalize_name(name), entry_point.name)
            if not entry_point.group.startswith(GROUP) or key in seen:
                continue
            seen.add(key)  # an earlier folder of sys.path hides later ones, as for imports
            digits = entry_point.group.removeprefix(GROUP)
            row = PluginStatus(name=entry_point.name, distribution=name, version=found)
            yield _Plugin(row, int(digits) if digits.isdigit() else -1, entry_point, distribution)


def _switched_off(name: str) -> _Refused | None:
    only = os.environ.get("POLYSILICON_PLUGINS")
    if only is not None and name not in _names(only):
        return _Refused("disabled", f"POLYSILICON_PLUGINS={only} does not name it")
    off = os.environ.get("POLYSILICON_DISABLE_PLUGINS", "")
    if name in _names(off) or "*" in _names(off):
        return _Refused("disabled", f"POLYSILICON_DISABLE_PLUGINS={off} names it")
    return None


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _negotiate(plugin: _Plugin) -> None:
    """Raises `_Refused` where this core and the plugin's distribution don't go together."""
    row = plugin.status
    if plugin.major != API_MAJOR:
        group = plugin.entry_point.group if plugin.entry_point else ""
        raise _Refused(
            "incompatible",
            f"it speaks plugin API {plugin.major} (entry-point group {group}), "
            f"but polysilicon {core_version()} speaks {API_MAJOR}",
            "pip install --upgrade polysilicon "
            f"{row.distribution}{'' if plugin.major > API_MAJOR else ' (a newer release of it)'}",
        )
    installed = core_version()
    for text in (plugin.distribution.requires or []) if plugin.distribution else []:
        wanted = Requirement(text)
        if canonicalize_name(wanted.name) != "polysilicon":
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if installed and not wanted.specifier.contains(installed, prereleases=True):
            release = Version(installed)
            raise _Refused(
                "incompatible",
                f"it needs polysilicon{wanted.specifier}, but polysilicon {installed} is installed",
                f"pip install 'polysilicon{wanted.specifier}', or install a "
                f"{row.distribution} that supports polysilicon {release.major}.{release.minor}: "
                f"pip install '{row.distribution}!={row.version}'",
            )


def _refuse_same_names(plugins: list[_Plugin]) -> None:
    by_name: dict[str, list[_Plugin]] = {}
    for plugin in plugins:
        by_name.setdefault(plugin.status.name, []).append(plugin)
    for name, same in by_name.items():
        if len(same) == 1 and name != CORE:
            continue
        whose = " and ".join(str(plugin.origin) for plugin in same)
        taken = f"both {whose} register" if len(same) > 1 else f"{whose} registers"
        for plugin in same:
            # Which of the two was meant is not core's to guess: neither is used.
            plugin.refuse(
                _Refused(
                    "broken",
                    f"{taken} a plugin named {name!r}"
                    + (", core's own name" if name == CORE else ""),
                    f"pip uninstall one of them: {', '.join(p.status.distribution for p in same)}",
                )
            )


# --- loading -----------------------------------------------------------------------------------


def _load(manager: pluggy.PluginManager, plugin: _Plugin) -> None:
    """Imports and registers one plugin; raises `_Refused` with what went wrong."""
    row = plugin.status
    report = f"report this to the authors of {row.distribution}"
    try:
        module = importlib.import_module("polysilicon.defaults")
        if plugin.entry_point is not None:
            module = plugin.entry_point.load()
    except (Exception, SystemExit) as error:
        raise _Refused("broken", f"importing it failed: {_short(error)}", report) from error
    _check_marks(module, row.name)
    try:
        manager.register(module, row.name)
        manager.check_pending()
    except Exception as error:
        if manager.has_plugin(row.name):
            manager.unregister(name=row.name)
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        known = ", ".join(_hook_names())
        raise _Refused(
            "broken", f"{message} (hooks of API {API_MAJOR}: {known})", report
        ) from error
    callers = manager.get_hookcallers(manager.get_plugin(row.name)) or []
    plugin.status = replace(row, hooks=tuple(sorted(caller.name for caller in callers)))
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is module and (
                implementation.hookwrapper or implementation.wrapper
            ):
                manager.unregister(name=row.name)
                raise _Refused(
                    "broken",
                    f"{caller.name} is a wrapper: hooks that answer with records can't be",
                    report,
                )


def _check_marks(module: Any, name: str) -> None:
    for attribute, value in vars(module).items():
        if (
            attribute.startswith("polysilicon_")
            and inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not hasattr(value, "polysilicon_impl")  # the mark that pluggy's decorator leaves
        ):
            raise _Refused(
                "broken",
                f"{attribute} is not marked as a hook",
                f"put @hookimpl above it in {name}",
            )


def _hook_names() -> list[str]:
    return sorted(name for name in vars(hookspecs) if name.startswith("polysilicon_"))


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# --- asking ------------------------------------------------------------------------------------


class _Asking:
    """Asks one hook of one plugin at a time, and remembers who failed."""

    def __init__(self, manager: pluggy.PluginManager, plugins: list[_Plugin]) -> None:
        self._manager = manager
        self._plugins = plugins

    def ask(
        self, hook: str, kind: type[Record], **arguments: object
    ) -> list[tuple[_Plugin, Provided[Record]]]:
        answers: list[tuple[_Plugin, Provided[Record]]] = []
        for plugin in self._plugins:
            if not plugin.active:
                continue
            try:
                records = self._call(plugin, hook, kind, arguments)
            except _Refused as why:
                if plugin.entry_point is None:
                    raise  # core's own plugin: a bug of ours, never hidden
                plugin.refuse(why)
            else:
                answers += [(plugin, Provided(record=r, origin=plugin.origin)) for r in records]
        return answers

    def _call(
        self, plugin: _Plugin, hook: str, kind: type[Record], arguments: Mapping[str, object]
    ) -> list[Record]:
        report = f"report this to the authors of {plugin.status.distribution}"
        own = self._manager.get_plugin(plugin.status.name)
        others = [other for other in self._manager.get_plugins() if other is not own]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            records = [record for answer in caller(**arguments) for record in answer]
        except (Exception, SystemExit) as error:
            raise _Refused("broken", f"{hook} raised {_short(error)}", report) from error
        names: set[str] = set()
        for record in records:
            if not isinstance(record, kind):
                came = type(record).__name__
                raise _Refused(
                    "broken", f"{hook} returned {came}, expected {kind.__name__}", report
                )
            name = record.name  # type: ignore[attr-defined]  # all three kinds have one
            if name in names:
                raise _Refused("broken", f"{hook} returned two records named {name!r}", report)
            names.add(name)
        return records


def _refuse_conflicts(answers: Iterable[tuple[_Plugin, Provided[Any]]]) -> None:
    """Two plugins with a record of one name: both are refused; against core, only the other."""
    by_name: dict[str, list[_Plugin]] = {}
    for plugin, provided in answers:
        by_name.setdefault(provided.record.name, []).append(plugin)
    for name, owners in by_name.items():
        if len(owners) == 1:
            continue
        whose = " and ".join(str(owner.origin) for owner in owners)
        for owner in owners:
            if owner.entry_point is not None:
                owner.refuse(
                    _Refused(
                        "broken",
                        f"the name {name!r} is provided by both {whose}",
                        f"turn one off: POLYSILICON_DISABLE_PLUGINS={owner.status.name}",
                    )
                )


def gather() -> Answers:
    """Finds, checks, loads and asks all plugins, now; `answers()` is the cached form."""
    plugins = sorted(_installed(), key=lambda plugin: plugin.status.name)
    _refuse_same_names(plugins)
    core = PluginStatus(name=CORE, distribution="polysilicon", version=core_version() or "source")
    plugins.append(_Plugin(core))
    manager = pluggy.PluginManager("polysilicon")
    manager.add_hookspecs(hookspecs)
    for plugin in plugins:
        try:
            if plugin.active and plugin.entry_point is not None:
                if off := _switched_off(plugin.status.name):
                    raise off
                _negotiate(plugin)
            if plugin.active:
                _load(manager, plugin)
        except _Refused as why:
            if plugin.entry_point is None:
                raise
            plugin.refuse(why)
    return _ask_all(_Asking(manager, plugins), plugins)


def _ask_all(asking: _Asking, plugins: list[_Plugin]) -> Answers:
    devices = asking.ask("polysilicon_devices", Device)
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


@functools.cache
def answers() -> Answers:
    """What all plugins answered, asked once per process. `answers.cache_clear()` asks anew."""
    return gather()


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
    remedy = f" To use it: {row.remedy}." if row.remedy else ""
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
            remedy = f" To use it: {row.remedy}." if row.remedy else ""
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
    for name in _names(os.environ.get("POLYSILICON_PLUGINS", "")):
        require(name)
    found = answers()
    for row in found.plugins:
        if row.state in ("incompatible", "broken"):
            notice(problem_text(row), PluginError)
    return found
