"""Which versions were released, read from the git history: no tags, no index, no list to keep.

A commit is the release of X.Y.Z if it is the first in which `version = "X.Y.Z"`, without `.dev`,
stands in the distribution's pyproject.toml. Landing a change may give it another commit id and
carries no tags; the text of the file survives.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from releasing.distributions import Distribution, Project, ReleasingError, parse

if TYPE_CHECKING:
    from pathlib import Path

    from packaging.version import Version


class HistoryError(ReleasingError):
    """The history that releases are read from is not here."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A released version of a distribution."""

    distribution: Distribution
    project: Project
    commit: str

    @property
    def version(self) -> Version:
        return self.project.version

    def __str__(self) -> str:
        return f"{self.project.name} {self.version}"


def git(root: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    """What a git command prints.

    Raises:
        ReleasingError: it failed; the text is git's own.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], input=stdin, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise HistoryError("git is not installed: releases are read from its history") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise ReleasingError(f"git {arguments[0]} failed: {said}")
    return done.stdout


def require_history(root: Path) -> None:
    """Nothing, where the whole history is here.

    Raises:
        HistoryError: this is no checkout of its own, or a shallow one; one sentence.
    """
    try:
        top = git(root, "rev-parse", "--show-toplevel").decode().strip()
        shallow = git(root, "rev-parse", "--is-shallow-repository").decode().strip() == "true"
    except HistoryError:
        raise
    except ReleasingError as error:
        first = str(error).splitlines()[0]
        raise HistoryError(
            f"{root} is not a git checkout ({first}), and released versions are built from the "
            "history: clone the repository"
        ) from error
    if not root.samefile(top):
        raise HistoryError(
            f"{root} lies inside another repository, {top}, and released versions are built from "
            "its own history: clone the repository"
        )
    if shallow:
        raise HistoryError(
            "this clone is shallow, and released versions are built from the history: "
            "run `git fetch --unshallow`, or clone without --depth"
        )


def releases(distribution: Distribution) -> list[Release]:
    """Every release of a distribution, lowest version first.

    Raises:
        HistoryError: the history is not here.
    """
    require_history(distribution.root)
    path = f"{distribution.folder}/pyproject.toml"
    listed = git(distribution.root, "log", "--reverse", "--format=%H", "--", path)
    commits = listed.decode().split()
    found: dict[Version, Release] = {}
    for commit, text in zip(commits, _texts(distribution.root, commits, path), strict=True):
        try:
            project = parse(text, f"{path} of {commit[:8]}")
        except ReleasingError:
            continue  # removed or unreadable in that commit: no version was released there
        if not project.version.is_prerelease:
            release = Release(distribution=distribution, project=project, commit=commit)
            found.setdefault(project.version, release)
    return [found[version] for version in sorted(found)]


def _texts(root: Path, commits: list[str], path: str) -> list[str]:
    """The file's text in each commit, read by one process; empty where it isn't in one."""
    wanted = "".join(f"{commit}:{path}\n" for commit in commits).encode()
    stream = io.BytesIO(git(root, "cat-file", "--batch", stdin=wanted))
    texts = []
    for _ in commits:
        header = stream.readline().split()
        size = int(header[-1]) if header[-1].isdigit() else None
        texts.append("" if size is None else stream.read(size).decode())
        if size is not None:
            stream.readline()
    return texts


def extract(root: Path, commit: str, folder: str, into: Path) -> Path:
    """Writes a folder as it was in a commit below `into`; the checkout stays as it is."""
    archive = git(root, "archive", "--format=tar", commit, folder)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(into, filter="data")
    return into / folder


def changed_since(root: Path, commit: str | None, folder: str) -> bool:
    """Whether the working tree's folder differs from a commit's; without one, it does."""
    if commit is None:
        return (root / folder).is_dir()
    edited = git(root, "diff", "--name-only", commit, "--", folder)
    added = git(root, "ls-files", "--others", "--exclude-standard", "--", folder)
    return bool(edited.strip() or added.strip())
