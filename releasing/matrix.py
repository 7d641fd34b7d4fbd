"""The cells of plugin × core: which versions are tested together, read from tree and history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from releasing import history
from releasing.distributions import CORE, Distribution, ReleasingError, distributions, find

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from releasing.history import Release

TREE = "main"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One plugin on one core.

    Attributes:
        plugin: the plugin in the tree.
        released: the plugin's release that is tested; None means the one in the tree.
        core: the release of core that it runs on; None means the one in the tree.
        id: reads like a sentence in `nox -l`.
        tags: the plugin's name, and `oldest`, `newest` or `main`.
        skip: why there is nothing to test; empty where there is.
        fail: why it can't be tested though it should be; empty where it can.
    """

    plugin: Distribution
    released: Release | None = None
    core: Release | None = None
    id: str
    tags: tuple[str, ...]
    skip: str = ""
    fail: str = ""


def plugins(root: Path) -> list[Distribution]:
    """The plugins of the tree, by name."""
    return [d for d in distributions(root) if not d.is_core]


def compat(root: Path) -> list[Cell]:
    """Each plugin of the tree on the oldest and the newest core it accepts, and on the tree's."""
    return [cell for plugin in plugins(root) for cell in _compat(plugin)]


def _compat(plugin: Distribution) -> Iterator[Cell]:
    name = plugin.name
    try:
        specifier = plugin.project().core_specifier
    except ReleasingError as error:
        every = (name, "oldest", "newest", TREE)
        yield Cell(plugin=plugin, id=f"{name}, core {TREE}", tags=every, fail=str(error))
        return
    core = find(plugin.root, CORE)
    picked: dict[str, tuple[Release | None, list[str]]] = {TREE: (None, [TREE])}
    ages = ("oldest", "newest")
    try:
        accepted = [r for r in history.releases(core) if r.version in specifier]
    except ReleasingError as error:
        yield Cell(plugin=plugin, id=f"{name}, core released", tags=(name, *ages), fail=str(error))
        accepted = []
    else:
        if not accepted:
            why = f"no released core satisfies {plugin.project().name}'s polysilicon{specifier}"
            yield Cell(plugin=plugin, id=f"{name}, core released", tags=(name, *ages), skip=why)
    for age, release in zip(ages, (accepted[:1], accepted[-1:]), strict=True):
        for chosen in release:
            # In the release commit itself the tree is that release: one cell for both.
            same = chosen.version == core.project().version
            key = TREE if same else str(chosen.version)
            picked.setdefault(key, (chosen, []))[1].append(age)
    for key, (chosen_core, tags) in picked.items():
        words = "" if key == TREE else f" {' '.join(tags)}"
        yield Cell(
            plugin=plugin, core=chosen_core, id=f"{name}, core {key}{words}", tags=(name, *tags)
        )


def backcompat(root: Path) -> list[Cell]:
    """The last release of each plugin on the core of the tree."""
    return [_backcompat(plugin) for plugin in plugins(root)]


def _backcompat(plugin: Distribution) -> Cell:
    core = find(plugin.root, CORE).project().version
    name, tags = plugin.name, (plugin.name, TREE)
    try:
        releases = history.releases(plugin)
    except ReleasingError as error:
        return Cell(plugin=plugin, id=f"{name} released, core {TREE}", tags=tags, fail=str(error))
    if not releases:
        why = f"{plugin.project().name} was never released"
        return Cell(plugin=plugin, id=f"{name} released, core {TREE}", tags=tags, skip=why)
    last = releases[-1]
    specifier = last.project.core_specifier
    skip = ""
    if not specifier.contains(core, prereleases=True):
        skip = f"{last} takes polysilicon{specifier}, and refuses this core, {core}, by itself"
    return Cell(
        plugin=plugin,
        released=last,
        id=f"{name} {last.version}, core {TREE}",
        tags=tags,
        skip=skip,
    )
