"""Packages built and installed for real, by uv, where a test needs real metadata."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def uv() -> str:
    """The uv of this environment, or of the machine."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("uv", path=beside)
    assert found is not None, "these tests install packages: pip install uv"
    return found


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """What a command prints; fails with all that it said. Settings of the user don't count."""
    kept = {name: value for name, value in os.environ.items() if "POLYSILICON" not in name}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def install_into(folder: Path, *packages: Path) -> None:
    """Builds packages and installs the wheels, without dependencies, into a folder for sys.path."""
    run(uv(), "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages)


def path_with(folder: Path) -> str:
    """PYTHONPATH that adds a folder to the path that this process has."""
    return os.pathsep.join((str(folder), *filter(None, sys.path)))
