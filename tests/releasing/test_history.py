"""Releases are read from the history alone, and built from it."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from releasing import history, wheels
from releasing.distributions import distributions
from releasing.history import HistoryError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Repository


def _versions(repository: Repository, name: str) -> list[str]:
    return [str(release.version) for release in history.releases(repository.distribution(name))]


def test_without_a_release_commit_there_is_no_release(repository: Repository) -> None:
    assert _versions(repository, "core") == []


def test_releases_are_the_versions_that_stood_without_dev(repository: Repository) -> None:
    repository.release("core", "polysilicon", "0.2.0")
    repository.release("core", "polysilicon", "0.1.1")
    assert _versions(repository, "core") == ["0.1.1", "0.2.0"]
    assert _versions(repository, "acme") == []


def test_the_first_commit_of_a_version_is_its_release(repository: Repository) -> None:
    repository.pyproject("core", "polysilicon", "0.1.0")
    repository.commit("polysilicon 0.1.0")
    first = repository.git("rev-parse", "HEAD")
    repository.pyproject("core", "polysilicon", "0.1.0", '"packaging"')
    repository.commit("A mistake: the version was still 0.1.0")
    assert [r.commit for r in history.releases(repository.distribution("core"))] == [first]


def test_a_clone_without_tags_knows_the_same_releases(
    repository: Repository, tmp_path: Path
) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    repository.git("tag", "core-v0.1.0")
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", "--no-tags", str(repository.root), str(clone))
    assert [str(r) for r in history.releases(distributions(clone)[0])] == ["polysilicon 0.1.0"]


def test_a_shallow_clone_is_one_sentence_of_failure(repository: Repository, tmp_path: Path) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", "--depth", "1", repository.root.as_uri(), str(clone))
    with pytest.raises(HistoryError, match=r"^this clone is shallow.*git fetch --unshallow"):
        history.releases(distributions(clone)[0])


def test_a_folder_without_git_is_one_sentence_of_failure(
    repository: Repository, tmp_path: Path
) -> None:
    (repository.root / ".git").rename(tmp_path / "elsewhere")
    with pytest.raises(HistoryError, match=r"is not a git checkout .* clone the repository$"):
        history.releases(repository.distribution("core"))


def test_a_folder_of_another_repository_is_one_sentence_of_failure(
    repository: Repository, tmp_path: Path
) -> None:
    (repository.root / ".git").rename(tmp_path / "elsewhere")
    repository.git("init", "--quiet", str(tmp_path))
    with pytest.raises(HistoryError, match="lies inside another repository"):
        history.releases(repository.distribution("core"))


def test_a_released_wheel_is_built_from_its_commit_and_kept(
    repository: Repository, tmp_path: Path
) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    repository.write("core/src/polysilicon/__init__.py", "ANSWER = 43\n")
    repository.commit("Another answer")
    [release] = history.releases(repository.distribution("core"))
    wheel = wheels.release_wheel(release, tmp_path / "wheelhouse")
    assert wheel.name == "polysilicon-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("polysilicon/__init__.py") == b"ANSWER = 42\n"
    made = wheel.stat().st_mtime_ns
    assert wheels.release_wheel(release, tmp_path / "wheelhouse").stat().st_mtime_ns == made
    source = wheels.release_source(release, tmp_path / "wheelhouse")
    assert (source / "src" / "polysilicon" / "__init__.py").read_text() == "ANSWER = 42\n"


def test_given_wheels_are_taken_as_they_are(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wheels.RELEASE_WHEELS, str(tmp_path))
    given = tmp_path / "polysilicon_acme-0.1.0.dev0-py3-none-any.whl"
    given.touch()
    assert wheels.tree_wheel(repository.distribution("acme"), tmp_path / "out") == given
