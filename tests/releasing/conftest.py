"""A small repository with a core and one plugin, and a history of its own."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from releasing.checks import MARKER
from releasing.distributions import Distribution, find

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"


@dataclass
class Repository:
    """A throwaway repository; `commit` takes the whole tree."""

    root: Path

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(self.root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(self, subject: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", subject)

    def add_distribution(self, folder: str, project: str, requirements: str = "") -> None:
        package = project.replace("-", "_")
        self.write(f"{folder}/CHANGELOG.md", f"# Changelog\n\n{MARKER}\n")
        self.write(f"{folder}/changes/.gitkeep", "")
        self.write(f"{folder}/src/{package}/__init__.py", "ANSWER = 42\n")
        self.pyproject(folder, project, "0.1.0.dev0", requirements)

    def pyproject(self, folder: str, project: str, version: str, requirements: str = "") -> None:
        package = project.replace("-", "_")
        self.write(
            f"{folder}/pyproject.toml",
            '[build-system]\nrequires = ["hatchling>=1.27"]\nbuild-backend = "hatchling.build"\n\n'
            f'[project]\nname = "{project}"\nversion = "{version}"\n'
            'requires-python = ">=3.11"\n'
            f"dependencies = [{requirements}]\n\n"
            f'[tool.hatch.build.targets.wheel]\npackages = ["src/{package}"]\n',
        )

    def fragment(self, folder: str, name: str, text: str = "It answers.") -> None:
        self.write(f"{folder}/changes/{name}.md", f"{text}\n")

    def release(self, folder: str, project: str, version: str, requirements: str = "") -> None:
        """The two commits of a release, written by hand."""
        for number in (version, f"{version.rpartition('.')[0]}.999.dev0"):
            self.pyproject(folder, project, number, requirements)
            self.commit(f"{project} {number}")

    def distribution(self, name: str) -> Distribution:
        return find(self.root, name)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Core and the plugin `acme`, neither of them released."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A Tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
    made = Repository(tmp_path / "repository")
    made.write("pyproject.toml", SETTINGS.read_text())
    made.write(".gitignore", "dist/\n.nox/\n")
    made.git("init", "--quiet", "--initial-branch", "main")
    made.add_distribution("core", "polysilicon")
    made.add_distribution("plugins/acme", "polysilicon-acme", '"polysilicon>=0.1.0,<0.3"')
    made.fragment("core", "+first.added")
    made.fragment("plugins/acme", "+first.added")
    made.commit("Begin")
    return made
