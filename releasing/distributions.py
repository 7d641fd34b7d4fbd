"""The distributions of the tree: core, and one for each folder in plugins/."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from packaging.specifiers import SpecifierSet

CORE = "core"
#: The distribution that core is, by the name in requirements.
CORE_PROJECT = "polysilicon"
_FLOORS = (">=", "==", "~=", ">")
_CEILINGS = ("<", "<=", "==", "~=")


class ReleasingError(Exception):
    """Something that stops a release or a cell of the matrix; its text says what to do."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """What a distribution's pyproject.toml says, in the tree or at some commit."""

    name: str
    version: Version
    requirements: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]
    groups: dict[str, Any]

    @property
    def core_specifier(self) -> SpecifierSet:
        """The versions of core that a plugin accepts; a floor and a ceiling are the least.

        Raises:
            ReleasingError: it has no requirement on core, or one that is open at an end.
        """
        wanted = [r for r in self.requirements if r.name == CORE_PROJECT]
        if len(wanted) != 1:
            raise ReleasingError(
                f"{self.name} has {len(wanted)} requirements on {CORE_PROJECT}: it needs one, "
                f"with a floor and a ceiling, such as '{CORE_PROJECT}>=0.3,<0.6'"
            )
        specifier = wanted[0].specifier
        operators = {bound.operator for bound in specifier}
        for end, allowed in (("floor", _FLOORS), ("ceiling", _CEILINGS)):
            if not operators.intersection(allowed):
                raise ReleasingError(
                    f"{self.name} requires '{wanted[0]}', which has no {end}: write both, "
                    f"such as '{CORE_PROJECT}>=0.3,<0.6'"
                )
        return specifier

    @property
    def core_floor(self) -> Version:
        """The lowest version of core that the requirement names."""
        bounds = [b for b in self.core_specifier if b.operator in _FLOORS]
        return max(Version(bound.version.removesuffix(".*")) for bound in bounds)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One folder that is built and released by itself.

    Attributes:
        name: how it is called here: `core`, or the plugin's folder name.
        root: the repository's root.
        folder: path from the root, with slashes.
    """

    name: str
    root: Path
    folder: str

    @property
    def path(self) -> Path:
        return self.root / self.folder

    @property
    def pyproject(self) -> Path:
        return self.path / "pyproject.toml"

    @property
    def is_core(self) -> bool:
        return self.name == CORE

    def project(self) -> Project:
        """What its pyproject.toml says in the working tree."""
        return parse(self.pyproject.read_text(encoding="utf-8"), str(self.pyproject))


def distributions(root: Path) -> list[Distribution]:
    """Core first, then the plugins by name."""
    plugins = sorted(path.parent.name for path in root.glob("plugins/*/pyproject.toml"))
    return [
        Distribution(name=CORE, root=root, folder=CORE),
        *(Distribution(name=name, root=root, folder=f"plugins/{name}") for name in plugins),
    ]


def find(root: Path, name: str) -> Distribution:
    """The distribution of that name.

    Raises:
        ReleasingError: there is none; names those that there are.
    """
    known = {distribution.name: distribution for distribution in distributions(root)}
    if name not in known:
        raise ReleasingError(f"there is no distribution {name!r}: there are {', '.join(known)}")
    return known[name]


def parse(text: str, where: str) -> Project:
    """The facts of a pyproject.toml that releases are about.

    Raises:
        ReleasingError: it can't be read, or lacks a name or a static version.
    """
    try:
        data = tomllib.loads(text)
        table = data["project"]
        extras = table.get("optional-dependencies", {})
        return Project(
            name=table["name"],
            version=Version(table["version"]),
            requirements=_requirements(table.get("dependencies", [])),
            extras={extra: _requirements(listed) for extra, listed in extras.items()},
            groups=data.get("dependency-groups", {}),
        )
    except (ValueError, KeyError) as error:
        raise ReleasingError(f"{where} is no pyproject with a static version: {error!r}") from error


def _requirements(listed: list[str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(text) for text in listed)


def pre_releases(project: Project) -> Iterator[str]:
    """Every requirement, extras included, that names a pre-release or a development version."""
    for requirement in (*project.requirements, *(r for rs in project.extras.values() for r in rs)):
        if any(Version(b.version.removesuffix(".*")).is_prerelease for b in requirement.specifier):
            yield str(requirement)


def with_version(text: str, version: Version) -> str:
    """The pyproject's text with another static version, and nothing else changed."""
    changed, count = re.subn(
        r'^(version = ")[^"]+(")$', rf"\g<1>{version}\g<2>", text, count=1, flags=re.MULTILINE
    )
    if count != 1 or parse(changed, "the changed pyproject").version != version:
        raise ReleasingError('pyproject.toml has no line `version = "X.Y.Z"` of its own')
    return changed
