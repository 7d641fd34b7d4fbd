"""Packages built and installed for real, by uv, where a test needs real metadata."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    return done.stdout


def install_into(folder: Path, *packages: Path) -> None:
    """Builds packages and installs the wheels, without dependencies, into a folder for sys.path."""
    run(uv(), "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages)


def path_with(folder: Path) -> str:
    """PYTHONPATH that adds a folder to the path that this process has."""
    return os.pathsep.join((str(folder), *filter(None, sys.path)))


def make_wheel(
    folder: Path, name: str, version: str, *, metadata: str, entry_points: str, code: str
) -> Path:
    """A wheel of one module, written by hand: what a build backend would make of it."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"{metadata}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def _record(files: Mapping[str, str], own: str) -> str:
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    return "\n".join([*lines, f"{own},,"]) + "\n"
