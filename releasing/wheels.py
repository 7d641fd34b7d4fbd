"""Wheels to install in the matrix: of the tree, and of releases, built from the history."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from releasing.distributions import ReleasingError
from releasing.history import extract

if TYPE_CHECKING:
    from packaging.version import Version

    from releasing.distributions import Distribution
    from releasing.history import Release

#: A folder with wheels that are taken as they are, instead of building that version: the release
#: tool tests the very files that will be uploaded.
RELEASE_WHEELS = "POLYSILICON_RELEASE_WHEELS"


def find_links() -> str:
    """The folders of wheels that pip is configured to look in; uv does not read pip's settings.

    Without them uv would take the newest CUDA build of torch, several GB, where the machine
    offers a CPU wheel.
    """
    if set_for_uv := os.environ.get("UV_FIND_LINKS"):
        return set_for_uv
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    folders = {
        folder
        for line in listing.splitlines()
        if line.partition("=")[0].endswith("find-links")
        for folder in line.partition("=")[2].strip("'\"").split()
    }
    folders.update(os.environ.get("PIP_FIND_LINKS", "").split())
    return " ".join(sorted(folders))


def build(source: Path, out: Path, *kinds: str) -> list[Path]:
    """Builds a folder; without kinds the sdist, and the wheel from that sdist.

    Raises:
        ReleasingError: the build failed; with the builder's own words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "uv", "build", *kinds, "--out-dir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleasingError(f"building {source} failed:\n{done.stderr.strip()}")
    return sorted(path for path in out.iterdir() if path.suffix in (".whl", ".gz"))


def _given(project: str, version: Version) -> Path | None:
    folder = os.environ.get(RELEASE_WHEELS)
    if not folder:
        return None
    name = project.replace("-", "_")
    return next(iter(Path(folder).glob(f"{name}-{version}-*.whl")), None)


def tree_wheel(distribution: Distribution, out: Path, *, by_sdist: bool = False) -> Path:
    """The wheel of the distribution as it lies in the tree, built into a folder of its own.

    Args:
        distribution: which one.
        out: where that folder is made.
        by_sdist: build it from the sdist, so that what the sdist lacks shows.
    """
    project = distribution.project()
    if given := _given(project.name, project.version):
        return given
    folder = out / distribution.name
    shutil.rmtree(folder, ignore_errors=True)
    return _only_wheel(build(distribution.path, folder, *(() if by_sdist else ("--wheel",))))


def release_wheel(release: Release, wheelhouse: Path) -> Path:
    """The wheel of a release: built once from its commit, then kept in the wheelhouse."""
    if given := _given(release.project.name, release.version):
        return given
    home = _home(release, wheelhouse)
    return _only_wheel(sorted((home / "wheel").glob("*.whl")))


def release_source(release: Release, wheelhouse: Path) -> Path:
    """The distribution's folder as it was released, tests included."""
    return _home(release, wheelhouse) / release.distribution.folder


def _home(release: Release, wheelhouse: Path) -> Path:
    """The folder of a release, made whole and then moved in place: sessions may run at once."""
    name = f"{release.distribution.name}-{release.version}-{release.commit[:12]}"
    home = wheelhouse / name
    if home.is_dir():
        return home
    wheelhouse.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=wheelhouse))
    source = extract(release.distribution.root, release.commit, release.distribution.folder, made)
    build(source, made / "wheel", "--wheel")
    try:
        made.rename(home)
    except OSError:
        if not home.is_dir():
            raise
        shutil.rmtree(made)  # another session was quicker, with the same wheel
    return home


def _only_wheel(paths: list[Path]) -> Path:
    wheels = [path for path in paths if path.suffix == ".whl"]
    if len(wheels) != 1:
        raise ReleasingError(f"expected one wheel, found {[path.name for path in wheels]}")
    return wheels[0]
