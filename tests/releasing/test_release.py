"""A release makes two commits, one pair of files and a tag, or leaves the branch as it was."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from releasing import __main__ as command
from releasing import checks, steps

if TYPE_CHECKING:
    from conftest import Repository

ACME = ("plugins/acme", "polysilicon-acme")
FLOOR = '"polysilicon>=0.1.0,<0.3"'


def _release(repository: Repository, *arguments: str) -> int:
    return command.main(["--root", str(repository.root), "release", *arguments])


def _problems(repository: Repository, name: str, version: str) -> list[str]:
    return checks.problems(checks.plan(repository.distribution(name), version))


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stands in for the matrix, which would build environments: keeps what it was asked."""
    asked: list[tuple[str, ...]] = []
    real = steps._run

    def run(root: object, *words: str, env: dict[str, str] | None = None) -> None:
        if words[:3] == (sys.executable, "-m", "nox"):
            asked.append((*words[3:], *sorted((env or {}).keys() & {"POLYSILICON_RELEASE_WHEELS"})))
        else:
            real(root, *words, env=env)  # type: ignore[arg-type]

    monkeypatch.setattr(steps, "_run", run)
    return asked


def test_the_first_release_of_core(repository: Repository, tested: list[tuple[str, ...]]) -> None:
    assert _release(repository, "core", "0.1.0") == 0
    assert repository.git("log", "--format=%s").splitlines() == [
        "core: open 0.2.0.dev0",
        "core 0.1.0",
        "Begin",
    ]
    assert repository.git("log", "--format=%s", "-1", "core-v0.1.0") == "core 0.1.0"
    assert repository.git("status", "--porcelain") == ""
    built = sorted(path.name for path in (repository.root / "dist" / "core-v0.1.0").glob("p*"))
    assert built == ["polysilicon-0.1.0-py3-none-any.whl", "polysilicon-0.1.0.tar.gz"]
    assert tested[0][-1] == "POLYSILICON_RELEASE_WHEELS"


def test_the_changelog_gets_the_fragments_and_they_go(
    repository: Repository, tested: list[tuple[str, ...]]
) -> None:
    repository.fragment("core", "12.kernel", "A kernel is faster.")
    repository.commit("A kernel")
    assert _release(repository, "core", "0.1.0") == 0
    text = (repository.root / "core" / "CHANGELOG.md").read_text()
    assert text.startswith(f"# Changelog\n\n{checks.MARKER}\n\n## 0.1.0 (")
    assert "\n### Added\n\n- It answers.\n" in text
    assert "\n### Kernels\n\n- A kernel is faster. (#12)\n" in text
    assert [path.name for path in (repository.root / "core/changes").iterdir()] == [".gitkeep"]


def test_a_second_release_stands_above_the_first(
    repository: Repository, tested: list[tuple[str, ...]]
) -> None:
    _release(repository, "core", "0.1.0")
    repository.fragment("core", "+more.fixed", "A bug is gone.")
    repository.commit("Mend")
    assert _release(repository, "core", "0.1.1") == 0
    text = (repository.root / "core" / "CHANGELOG.md").read_text()
    assert 0 < text.index("## 0.1.1") < text.index("## 0.1.0")
    # The tree was at 0.2.0.dev0 and stays there.
    assert repository.git("log", "--format=%s", "-1") == "core: open 0.2.0.dev0"


def test_a_plugin_is_tested_in_its_own_cells(
    repository: Repository, tested: list[tuple[str, ...]]
) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    assert _release(repository, "acme", "0.1.0") == 0
    assert tested[0][:-1] == ("-s", "compat", "backcompat", "wheels", "-t", "acme")


def test_failed_tests_leave_the_branch_as_it_was(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = repository.git("rev-parse", "HEAD")
    monkeypatch.setattr(steps.Making, "cells", ["--no-such-option"])
    assert _release(repository, "core", "0.1.0") == 1
    assert repository.git("rev-parse", "HEAD") == before
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("tag") == ""
    assert "undone: the branch is at" in capfd.readouterr().out


def test_what_others_committed_meanwhile_stays(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def test(making: steps.Making) -> None:
        repository.write("README.md", "Meanwhile\n")
        repository.commit("Meanwhile")
        raise steps.ReleasingError("a test failed")

    monkeypatch.setattr(steps.Making, "_test", test)
    assert _release(repository, "core", "0.1.0") == 1
    assert repository.git("log", "--format=%s", "-1") == "Meanwhile"
    assert "not undone: others committed" in capsys.readouterr().out


def test_a_dry_run_prints_the_steps_and_changes_nothing(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    before = repository.git("rev-parse", "HEAD")
    assert _release(repository, "core", "0.1.0", "--dry-run") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "1. write 0.1.0 into core/pyproject.toml"
    assert shown[-1].endswith("as 'core: open 0.2.0.dev0'")
    assert repository.git("rev-parse", "HEAD") == before


def test_an_unknown_distribution_and_another_form_of_version_are_told(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _release(repository, "nvidai", "0.1.0") == 1
    assert "no distribution 'nvidai': there are core, acme" in capsys.readouterr().err
    assert _release(repository, "core", "v0.1") == 1
    assert "the version is 'v0.1': expected X.Y.Z" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.1.1", "0.2.0", "1.0.0"])
def test_the_first_release_is_the_version_of_the_tree(repository: Repository, version: str) -> None:
    assert _problems(repository, "core", version) == [
        "there was no release yet, so the first is the tree's 0.1.0"
    ]


@pytest.mark.parametrize("version", ["0.1.0", "0.1.2", "0.3.0", "2.0.0"])
def test_a_version_follows_the_last(repository: Repository, version: str) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    assert _problems(repository, "core", version)[0] == (
        f"{version} does not follow 0.1.0: next are 0.1.1 (patch), 0.2.0 (minor), 1.0.0 (major)"
    )


def test_a_patch_does_not_change_or_remove(repository: Repository) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    repository.fragment("core", "+gone.removed", "It no longer answers.")
    repository.commit("Remove")
    [problem] = _problems(repository, "core", "0.1.1")
    assert problem.endswith("of type removed: a patch never breaks anyone, release 0.2.0")


def test_a_dirty_tree_is_refused(repository: Repository) -> None:
    repository.write("core/src/polysilicon/new.py", "")
    assert _problems(repository, "core", "0.1.0") == [
        "the tree is not clean (?? core/src/polysilicon/new.py): commit or stash first"
    ]


def test_development_floors_and_pre_releases_are_refused(repository: Repository) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    requirements = '"polysilicon>=0.1.0.dev0,<0.3", "numpy>=2.0rc1"'
    repository.pyproject(*ACME, "0.1.0.dev0", requirements)
    repository.commit("Requirements")
    assert _problems(repository, "acme", "0.1.0") == [
        "it requires 'polysilicon<0.3,>=0.1.0.dev0', a pre-release: require a released version",
        "it requires 'numpy>=2.0rc1', a pre-release: require a released version",
    ]


def test_a_release_without_fragments_is_refused(repository: Repository) -> None:
    (repository.root / "core/changes/+first.added.md").unlink()
    repository.commit("No fragment")
    problems = _problems(repository, "core", "0.1.0")
    assert problems[0].startswith("core/src changed and was never released, and core/changes has")
    assert problems[1] == "core/changes has no fragment: what would users gain?"


def test_a_changelog_without_the_place_for_it_is_refused(repository: Repository) -> None:
    repository.write("core/CHANGELOG.md", "# Changelog\n")
    repository.commit("Shorten")
    [problem] = _problems(repository, "core", "0.1.0")
    assert problem.startswith("core/CHANGELOG.md has no line '<!-- towncrier")


def test_a_plugin_is_not_released_before_core(repository: Repository) -> None:
    assert _problems(repository, "acme", "0.1.0") == ["core was never released: release core first"]


def test_a_plugin_supports_the_current_minor_of_core_and_two_before(
    repository: Repository,
) -> None:
    for version in ("0.1.0", "0.2.0", "0.3.0", "0.4.0"):
        repository.release("core", "polysilicon", version)
    repository.pyproject(*ACME, "0.1.0.dev0", '"polysilicon>=0.3.0,<0.5"')
    repository.commit("A narrow range")
    [problem] = _problems(repository, "acme", "0.1.0")
    assert problem.startswith("'<0.5,>=0.3.0' leaves out core 0.2: a release supports")


def test_a_raised_floor_is_a_changelog_entry(repository: Repository) -> None:
    for version in ("0.1.0", "0.2.0", "0.3.0", "0.4.0"):
        repository.release("core", "polysilicon", version)
    repository.release(*ACME, "0.1.0", '"polysilicon>=0.1.0,<0.5"')
    repository.pyproject(*ACME, "0.2.0.dev0", '"polysilicon>=0.2.0,<0.5"')
    repository.commit("Raise the floor")
    [problem] = _problems(repository, "acme", "0.2.0")
    assert problem.startswith("the floor on core rose from 0.1.0 to 0.2.0, and no 'changed'")
    repository.fragment("plugins/acme", "+floor.changed", "It needs polysilicon 0.2.0.")
    repository.commit("Say so")
    assert _problems(repository, "acme", "0.2.0") == []


def test_changed_sources_need_a_fragment(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--root", str(repository.root), "fragments"]
    assert command.main(arguments) == 0
    (repository.root / "plugins/acme/changes/+first.added.md").unlink()
    repository.release(*ACME, "0.1.0", FLOOR)
    assert command.main(arguments) == 0
    repository.write("plugins/acme/src/polysilicon_acme/new.py", "ANSWER = 43\n")
    assert command.main(arguments) == 1
    assert "changed since polysilicon-acme 0.1.0, and plugins/acme/changes has no" in (
        capsys.readouterr().err
    )
    repository.fragment("plugins/acme", "+new.feature")
    assert command.main(arguments) == 1
    assert "+new.feature.md: expected <name>.<type>.md" in capsys.readouterr().err
