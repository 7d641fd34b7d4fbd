"""Which plugins are installed, and which may run: decided before any of their code is imported."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import TYPE_CHECKING, Literal

from polysilicon.records import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution, EntryPoint

    from packaging.requirements import Requirement

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


class Refused(Exception):
    """A plugin cannot be used: carries the row's new state, reason and remedy."""

    def __init__(self, state: State, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.remedy = remedy


@dataclass
class Plugin:
    """One plugin on its way from an entry point to its answers."""

    status: PluginStatus
    major: str = str(API_MAJOR)
    entry_point: EntryPoint | None = None  # None for core's own plugin
    distribution: Distribution | None = None

    @property
    def origin(self) -> Origin:
        """What its records are stamped with."""
        row = self.status
        return Origin(plugin=row.name, distribution=row.distribution, version=row.version)

    @property
    def active(self) -> bool:
        """Whether nothing is against it so far."""
        return self.status.state == "active"

    def refuse(self, why: Refused) -> None:
        """Takes it out, with the reason in its row."""
        self.status = replace(self.status, state=why.state, reason=why.reason, remedy=why.remedy)


def core_version() -> str:
    """The installed version of core; empty where it runs from a source tree."""
    try:
        return version("polysilicon")
    except PackageNotFoundError:
        return ""


def entry_points(prefix: str) -> Iterator[tuple[Distribution, EntryPoint]]:
    """Every installed entry point whose group begins with `prefix`."""
    seen: set[tuple[str, str, str]] = set()
    for distribution in distributions():
        text = distribution.read_text("entry_points.txt")
        if not text or prefix not in text:  # spares parsing the metadata of everything installed
            continue
        name = _canonical(distribution.metadata["Name"])
        for entry_point in distribution.entry_points:
            key = (name, entry_point.group, entry_point.name)
            if entry_point.group.startswith(prefix) and key not in seen:
                seen.add(key)  # an earlier folder of sys.path hides later ones, as for imports
                yield distribution, entry_point


def installed() -> Iterator[Plugin]:
    """Every plugin that some installed distribution declares, of any API major."""
    for distribution, entry_point in entry_points(GROUP):
        row = PluginStatus(
            name=entry_point.name,
            distribution=distribution.metadata["Name"],
            version=distribution.version,
        )
        yield Plugin(row, entry_point.group.removeprefix(GROUP), entry_point, distribution)


def named(text: str) -> list[str]:
    """The names in a comma-separated setting."""
    return [part.strip() for part in text.split(",") if part.strip()]


def switched_off(name: str) -> Refused | None:
    """Why the environment turns a plugin off; None where it doesn't."""
    only = os.environ.get("POLYSILICON_PLUGINS")
    if only is not None and name not in named(only):
        return Refused(
            "disabled",
            f"POLYSILICON_PLUGINS={only} does not name it",
            f"add {name} to POLYSILICON_PLUGINS, or unset it",
        )
    off = os.environ.get("POLYSILICON_DISABLE_PLUGINS", "")
    if name in named(off) or "*" in named(off):
        return Refused(
            "disabled",
            f"POLYSILICON_DISABLE_PLUGINS={off} names it",
            f"take {name if name in named(off) else '*'} out of POLYSILICON_DISABLE_PLUGINS",
        )
    return None


def negotiate(plugin: Plugin) -> None:
    """Raises `Refused` where this core and the plugin's distribution don't go together."""
    row = plugin.status
    if plugin.major != str(API_MAJOR):
        newer = plugin.major.isdigit() and int(plugin.major) > API_MAJOR
        raise Refused(
            "incompatible",
            f"it speaks plugin API {plugin.major} (entry-point group {GROUP}{plugin.major}), "
            f"but polysilicon {core_version()} speaks {API_MAJOR}",
            f"pip install --upgrade {'polysilicon' if newer else row.distribution}",
        )
    if plugin.distribution is not None:
        check_requirements(plugin.distribution)


def check_requirements(distribution: Distribution) -> None:
    """Raises `Refused` where a distribution's own `Requires-Dist` doesn't accept this core.

    Installers check it too; upgrades in place leave pairs behind that they would refuse.
    """
    from packaging.requirements import Requirement  # imported only where there is a plugin

    core = core_version()
    for text in distribution.requires or []:
        wanted = Requirement(text)
        if _canonical(wanted.name) != "polysilicon" or not core:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if not wanted.specifier.contains(core, prereleases=True):
            raise _mismatch(distribution, wanted, core)


def _canonical(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _mismatch(distribution: Distribution, wanted: Requirement, core: str) -> Refused:
    from packaging.version import Version

    name = distribution.metadata["Name"]
    core_is_old = any(
        bound.operator in (">", ">=", "~=") and Version(core) < Version(bound.version)
        for bound in wanted.specifier
    )
    release, own = Version(core), Version(distribution.version)
    reason = f"it needs polysilicon{wanted.specifier}, but polysilicon {core} is installed"
    remedy = f"pip install 'polysilicon{wanted.specifier}'"
    if not (own.is_prerelease or (core_is_old and own.release <= (0, 1, 0))):
        # Of a first version, or one that isn't released, there may be no other to install.
        remedy += (
            f", or install the {name} that supports polysilicon {release.major}.{release.minor}: "
            f"pip install '{name}{'<' if core_is_old else '>'}{distribution.version}'"
        )
    return Refused("incompatible", reason, remedy)


def refuse_same_names(plugins: list[Plugin]) -> None:
    """Refuses every active plugin whose name another one, or core, has."""
    by_name: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.active:
            by_name.setdefault(plugin.status.name, []).append(plugin)
    for name, same in by_name.items():
        if len(same) == 1 and name != CORE:
            continue
        whose = " and ".join(str(plugin.origin) for plugin in same)
        taken = f"both {whose} register" if len(same) > 1 else f"{whose} registers"
        whole = f"{taken} a plugin named {name!r}" + (", core's own name" if name == CORE else "")
        # Which of them was meant is not core's to guess: none is used.
        remedy = ", or ".join(f"pip uninstall {plugin.status.distribution}" for plugin in same)
        for plugin in same:
            plugin.refuse(Refused("broken", whole, remedy))
