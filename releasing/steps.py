"""The steps of a release, in order, each with the sentence that `--dry-run` prints."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from releasing import history
from releasing.distributions import ReleasingError, with_version
from releasing.wheels import RELEASE_WHEELS, build

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.version import Version

    from releasing.checks import Plan


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: what it does, in words, and the doing."""

    text: str
    act: Callable[[], None]


@dataclass(kw_only=True)
class Making:
    """Makes one planned release in a clean checkout; `commit` is the release commit, once made."""

    plan: Plan
    commit: str = ""

    @property
    def root(self) -> Path:
        return self.plan.distribution.root

    @property
    def out(self) -> Path:
        """The folder of the files that are tested and then uploaded."""
        return self.root / "dist" / self.plan.tag

    @property
    def cells(self) -> list[str]:
        """Arguments of nox for the cells that test the wheel."""
        if self.plan.distribution.is_core:
            return ["-s", "compat", "backcompat", "together", "wheels", "-t", "main"]
        name = self.plan.distribution.name
        return ["-s", "compat", "backcompat", "wheels", "-t", name]

    def before_the_tag(self) -> list[Step]:
        """What is undone when one of them fails."""
        plan, folder = self.plan, self.plan.distribution.folder
        return [
            Step(
                text=f"write {plan.version} into {folder}/pyproject.toml",
                act=lambda: self._write_version(plan.version),
            ),
            Step(
                text=f"move {folder}/changes into {folder}/CHANGELOG.md with towncrier",
                act=self._write_changelog,
            ),
            Step(
                text=f"commit that as '{plan.distribution.name} {plan.version}'",
                act=self._commit_release,
            ),
            Step(
                text="build sdist and wheel, once, from that commit into "
                f"{self.out.relative_to(self.root)}",
                act=self._build,
            ),
            Step(
                text=f"test that very wheel: nox {' '.join(self.cells)}",
                act=self._test,
            ),
        ]

    def from_the_tag(self) -> list[Step]:
        """What seals the release."""
        plan, folder = self.plan, self.plan.distribution.folder
        subject = f"{plan.distribution.name}: open {plan.opens}"
        return [
            Step(text=f"tag that commit {plan.tag}, here only", act=self._tag),
            Step(
                text=f"write {plan.opens} into {folder}/pyproject.toml",
                act=lambda: self._write_version(plan.opens),
            ),
            Step(
                text=f"commit that, apart from the release, as '{subject}'",
                act=lambda: self._commit(subject),
            ),
        ]

    def run(self, say: Callable[[str], None]) -> None:
        """Makes the release up to the upload; where that fails, the branch is as it was.

        Raises:
            ReleasingError: a step failed.
        """
        before = self._head()
        try:
            for step in self.before_the_tag():
                say(step.text)
                step.act()
        except BaseException:
            say(self._undo(before))
            raise
        for step in self.from_the_tag():
            say(step.text)
            step.act()

    def upload_text(self) -> str:
        """What is left to do, for a person or a publishing job."""
        branch = history.git(self.root, "branch", "--show-current").decode().strip()
        files = f"{self.out.relative_to(self.root)}/*"
        return (
            "Nothing was uploaded. To publish, in this order:\n"
            f"  git push origin {branch} {self.plan.tag}\n"
            f"  uv publish {files}\n"
            "The two commits must land as two, unsquashed: the matrix finds releases by them. The "
            "second line belongs into the publishing job, docs/releases.md."
        )

    def _write_version(self, version: Version) -> None:
        path = self.plan.distribution.pyproject
        text = path.read_text(encoding="utf-8")
        path.write_text(with_version(text, version), encoding="utf-8")

    def _write_changelog(self) -> None:
        _run(
            self.root,
            *(sys.executable, "-m", "towncrier", "build", "--yes"),
            *("--config", str(self.root / "pyproject.toml")),
            *("--dir", str(self.plan.distribution.path)),
            *("--version", str(self.plan.version)),
            *("--date", datetime.datetime.now(tz=datetime.UTC).date().isoformat()),
        )

    def _head(self) -> str:
        return history.git(self.root, "rev-parse", "HEAD").decode().strip()

    def _commit_release(self) -> None:
        self._commit(f"{self.plan.distribution.name} {self.plan.version}")
        self.commit = self._head()

    def _commit(self, subject: str) -> None:
        history.git(self.root, "add", "--all", "--", self.plan.distribution.folder)
        history.git(self.root, "commit", "--quiet", "-m", subject)

    def _build(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            source = history.extract(
                self.root, self.commit, self.plan.distribution.folder, Path(folder)
            )
            built = build(source, self.out)
        if len(built) != 2:
            raise ReleasingError(f"expected an sdist and a wheel, got {[p.name for p in built]}")

    def _test(self) -> None:
        _run(
            self.root,
            *(sys.executable, "-m", "nox", *self.cells),
            env={**os.environ, RELEASE_WHEELS: str(self.out)},
        )

    def _tag(self) -> None:
        subject = f"{self.plan.project.name} {self.plan.version}"
        history.git(self.root, "tag", "--annotate", self.plan.tag, "-m", subject, self.commit)

    def _undo(self, before: str) -> str:
        """Takes back the folder's edits and our commit; the tree was clean when we began."""
        if self._head() not in (before, self.commit):
            return (
                f"not undone: others committed on top of {before[:8]} meanwhile; the release "
                f"commit {self.commit[:8]} is yours to revert"
            )
        folder = self.plan.distribution.folder
        history.git(self.root, "reset", "--quiet", "--", folder)
        history.git(self.root, "checkout", "--quiet", "--", folder)
        history.git(self.root, "reset", "--quiet", "--keep", before)
        return f"undone: the branch is at {before[:8]} again"


def _run(root: Path, *command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=root, env=env, check=False)
    if done.returncode:
        shown = " ".join(command[2:])
        raise ReleasingError(f"`{shown}` failed with exit status {done.returncode}")
