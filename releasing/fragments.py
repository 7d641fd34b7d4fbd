"""Changelog fragments: `changes/<name>.<type>.md` beside the sources of a distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from releasing import history

if TYPE_CHECKING:
    from pathlib import Path

    from releasing.distributions import Distribution

#: The types, as [tool.towncrier] lists them.
TYPES = ("added", "changed", "deprecated", "removed", "fixed", "kernel")


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One entry of the next changelog."""

    path: Path
    type: str
    text: str


def fragments(distribution: Distribution) -> list[Fragment]:
    """The fragments of the next release, by file name; whatever else lies there is left out."""
    found = []
    for path in sorted((distribution.path / "changes").glob("*.md")):
        kind = path.name.split(".")[-2]
        if kind in TYPES:
            text = path.read_text(encoding="utf-8").strip()
            found.append(Fragment(path=path, type=kind, text=text))
    return found


def problems(distribution: Distribution) -> list[str]:
    """What is wrong with a distribution's fragments, compared with its last release.

    Raises:
        HistoryError: the history is not here.
    """
    known = fragments(distribution)
    folder = f"{distribution.folder}/changes"
    types = ", ".join(TYPES)
    wrong = [
        f"{folder}/{path.name}: expected <name>.<type>.md, with a type of {types}"
        for path in sorted((distribution.path / "changes").glob("*"))
        if path.name != ".gitkeep" and path not in {fragment.path for fragment in known}
    ]
    wrong += [
        f"{folder}/{fragment.path.name} is empty: write one sentence for users"
        for fragment in known
        if not fragment.text
    ]
    last = next(reversed(history.releases(distribution)), None)
    source = f"{distribution.folder}/src"
    commit = last.commit if last else None
    if not known and history.changed_since(distribution.root, commit, source):
        since = f"since {last}" if last else "and was never released"
        wrong.append(
            f"{source} changed {since}, and {folder} has no fragment: add <name>.<type>.md with "
            f"one sentence for users; the types are {types}"
        )
    return wrong
