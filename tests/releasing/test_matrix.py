"""The cells of plugin × core follow from the plugins' requirements and the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from releasing import matrix

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Repository

ACME = ("plugins/acme", "polysilicon-acme")


def _cells(repository: Repository) -> dict[str, tuple[str, ...]]:
    return {cell.id: cell.tags for cell in matrix.compat(repository.root)}


def test_without_a_release_the_cell_says_so_and_skips(repository: Repository) -> None:
    released = matrix.compat(repository.root)[0]
    assert released.id == "acme, core released"
    assert released.skip == (
        "no released core satisfies polysilicon-acme's polysilicon<0.3,>=0.1.0"
    )


def test_oldest_and_newest_are_the_ends_of_the_range(repository: Repository) -> None:
    for version in ("0.1.0", "0.1.1", "0.2.0", "0.3.0"):
        repository.release("core", "polysilicon", version)
    repository.pyproject("core", "polysilicon", "0.4.0.dev0")
    assert _cells(repository) == {
        "acme, core main": ("acme", "main"),
        "acme, core 0.1.0 oldest": ("acme", "oldest"),
        "acme, core 0.2.0 newest": ("acme", "newest"),
    }


def test_one_release_is_one_cell_with_both_tags(repository: Repository) -> None:
    repository.release("core", "polysilicon", "0.1.0")
    assert _cells(repository) == {
        "acme, core main": ("acme", "main"),
        "acme, core 0.1.0 oldest newest": ("acme", "oldest", "newest"),
    }


def test_in_the_release_commit_the_tree_is_that_release(repository: Repository) -> None:
    repository.pyproject("core", "polysilicon", "0.1.0")
    repository.commit("core 0.1.0")
    assert _cells(repository) == {"acme, core main": ("acme", "main", "oldest", "newest")}


def test_a_requirement_without_a_floor_fails(repository: Repository) -> None:
    repository.pyproject(*ACME, "0.1.0.dev0", '"polysilicon<0.3"')
    [cell] = matrix.compat(repository.root)
    assert "has no floor: write both" in cell.fail


def test_a_missing_history_fails_the_released_cells_and_not_the_tree(
    repository: Repository, tmp_path: Path
) -> None:
    (repository.root / ".git").rename(tmp_path / "elsewhere")
    released, tree = matrix.compat(repository.root)
    assert "is not a git checkout" in released.fail
    assert not tree.fail
    assert "is not a git checkout" in matrix.backcompat(repository.root)[0].fail


def test_backcompat_takes_the_last_release_of_the_plugin(repository: Repository) -> None:
    assert matrix.backcompat(repository.root)[0].skip == "polysilicon-acme was never released"
    for version in ("0.1.0", "0.1.1"):
        repository.release(*ACME, version, '"polysilicon>=0.1.0.dev0,<0.2"')
    [cell] = matrix.backcompat(repository.root)
    assert (cell.id, cell.tags, cell.skip) == ("acme 0.1.1, core main", ("acme", "main"), "")


def test_backcompat_skips_a_core_that_the_release_refuses(repository: Repository) -> None:
    repository.release(*ACME, "0.1.0", '"polysilicon>=0.1.0,<0.2"')
    repository.pyproject("core", "polysilicon", "0.2.0.dev0")
    assert matrix.backcompat(repository.root)[0].skip == (
        "polysilicon-acme 0.1.0 takes polysilicon<0.2,>=0.1.0, and refuses this core, "
        "0.2.0.dev0, by itself"
    )
