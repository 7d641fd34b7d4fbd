"""`polysilicon compile`: what works, each way a compiler can fail, and budget files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from polysilicon import cli
from polysilicon.devices import find
from polysilicon.offline import budgets
from polysilicon.offline.running import compile_kernels
from polysilicon.records import Compiled, Device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result

FORGE = Device(name="forge:f1", kind="forge", arch="f1", present=False)


@pytest.fixture(autouse=True)
def forge(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("offline")
    monkeypatch.setenv("COLUMNS", "120")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.build("compile"), ["compile", *arguments])


def _json(*arguments: str, status: int) -> list[dict[str, Any]]:
    result = _run(*arguments, "--device", "forge:f1", "--json")
    assert result.exit_code == status, result.output
    data = json.loads(result.stdout)
    assert (data["schema"], data["device"]) == (1, "forge:f1")
    rows: list[dict[str, Any]] = data["kernels"]
    return rows


def _problem(op: str) -> str:
    """The one problem of an op's kernel."""
    (row,) = _json(op, status=1)
    (problem,) = row["problems"]
    return str(problem)


def test_variants_come_with_their_facts() -> None:
    first, second = _json("rms_norm", status=0)
    assert first == {
        "op": "rms_norm",
        "kernel": "rms_norm.forge",
        "plugin": "forge",
        "origin": "acme-offline 1.0",
        "variant": "hidden 64",
        "seconds": 0.5,
        "facts": {"toolchain": "anvil 1.2", "registers": 40, "spills": 0, "code_bytes": 512},
        "problems": [],
    }
    assert second["facts"]["matrix_instruction"] == "hammer"


def test_table_says_that_nothing_ran() -> None:
    result = _run("rms_norm", "--device", "forge:f1")
    assert result.exit_code == 0
    assert "hidden [big]" in result.stdout
    assert "hammer" in result.stdout
    assert "2 variants for forge:f1, 0 with problems: compiled offline, not run" in result.stdout


def test_table_prints_problems_in_full() -> None:
    result = _run("lm_head", "--device", "forge")
    assert result.exit_code == 1
    assert "vocabulary 32000: took 46 s to compile" in result.stdout


def test_crash_costs_only_its_kernel_and_says_what_was_last_heard() -> None:
    rows = _json("silu_and_mul", "rms_norm", status=1)
    by_kernel = {(row["kernel"], row["variant"]): row["problems"] for row in rows}
    assert by_kernel == {
        ("rms_norm.forge", "hidden 64"): [],
        ("rms_norm.forge", "hidden [big]"): [],
        ("silu_and_mul.forge", "hidden 64"): [],
        ("silu_and_mul.forge", "after hidden 64"): [
            "the compiling process ended with SIGABRT, saying: anvil: internal error"
        ],
    }


def test_variant_that_comes_twice_is_a_problem() -> None:
    first, second = _json("rms_norm_gated", status=1)
    assert first["problems"] == []
    assert second["problems"] == ["came twice: each variant of a kernel needs a name of its own"]


def test_hang_is_killed_and_the_next_kernel_goes_on() -> None:
    names = ["gelu_and_mul.forge", "rms_norm.forge"]
    made = list(compile_kernels(find("forge:f1"), names, patience=10))
    assert [m.kernel for m in made] == ["gelu_and_mul.forge", "rms_norm.forge", "rms_norm.forge"]
    assert made[0].problems == ("hangs: killed after 10 s without a result",)


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("layer_norm", "acme_offline:raises raised RuntimeError: no such instruction"),
        (
            "kv_store",
            "needs anvil_compiler, which is not installed: pip install anvil_compiler, or",
        ),
        ("linear", "compiled nothing: its offline function yielded no variant"),
        ("lm_head", "took 46 s to compile, at most 20 s is accepted"),
        ("embedding", "expected Compiled records of kernel embedding.forge, got Compiled(kernel='"),
    ],
)
def test_failure_is_a_problem_of_its_kernel(op: str, problem: str) -> None:
    assert problem in _problem(op)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "no kernel for cpu compiles offline: name a chip whose plugin"),
        (["sampling", "--device", "forge"], "no kernel of sampling for forge:f1 compiles offline"),
        (["rmsnorm", "--device", "forge"], "there is no op 'rmsnorm'"),
        (["--check-budget", "/nowhere"], "/nowhere is no folder: --write-budget writes"),
        (["--write-budget", __file__], "test_compile_command.py is no folder"),
        (["--write-budget", ".", "--check-budget", "."], "can't be used together"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_regression_against_the_written_budget_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _json("rms_norm", "--write-budget", str(tmp_path), status=0)
    _json("rms_norm", "--check-budget", str(tmp_path), status=0)
    monkeypatch.setenv("ACME_CODE", "700")
    first, second = _json("rms_norm", "--check-budget", str(tmp_path), status=1)
    assert first["problems"] == ["code_bytes is 700, its budget says 512"]
    assert second["problems"] == []


def test_a_missing_folder_is_made_for_budgets(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "budgets"
    _json("rms_norm", "--write-budget", str(folder), status=0)
    _json("rms_norm", "--check-budget", str(folder), status=0)


def test_a_kernel_with_a_problem_gets_no_budget(tmp_path: Path) -> None:
    _json("lm_head", "--write-budget", str(tmp_path), status=1)
    assert list(tmp_path.iterdir()) == []


def _made(variant: str, toolchain: str = "anvil 1.2", registers: int = 40) -> Compiled:
    facts = {"toolchain": toolchain, "registers": registers}
    return Compiled(kernel="k", variant=variant, seconds=0.1, facts=facts)


def test_budgets_of_other_toolchains_and_chips_are_kept(tmp_path: Path) -> None:
    other = Device(name="forge:f2", kind="forge", arch="f2", present=False)
    budgets.write(tmp_path, FORGE, [_made("a"), _made("b")])
    budgets.write(tmp_path, other, [_made("a", registers=50)])
    budgets.write(tmp_path, FORGE, [_made("a", toolchain="anvil 2.0", registers=60)])
    data = json.loads((tmp_path / "k.budget.json").read_text())
    assert data["budgets"] == {
        "anvil 1.2": {
            "f1": {"a": {"registers": 40}, "b": {"registers": 40}},
            "f2": {"a": {"registers": 50}},
        },
        "anvil 2.0": {"f1": {"a": {"registers": 60}}},
    }


def test_what_is_missing_on_either_side_is_a_difference(tmp_path: Path) -> None:
    budgets.write(tmp_path, FORGE, [_made("a"), _made("b")])
    path = tmp_path / "k.budget.json"
    assert budgets.differences(tmp_path, FORGE, [_made("a"), _made("c")]) == {
        "b": [f"is in the budget {path}, but was not compiled"],
        "c": ["has no budget"],
    }
    newer = [_made("a", toolchain="anvil 2.0")]
    text = f"has no budget for anvil 2.0 on f1 in {path}"
    assert budgets.differences(tmp_path, FORGE, newer) == {"a": [text]}


def test_a_damaged_budget_and_an_unnamed_toolchain_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "k.budget.json").write_text("{}")
    with pytest.raises(ValueError, match=r"k\.budget\.json is not a budget file: KeyError"):
        budgets.differences(tmp_path, FORGE, [_made("a")])
    unnamed = Compiled(kernel="other", variant="a", seconds=0.1)
    with pytest.raises(ValueError, match=r"other states no fact 'toolchain', e\.g\. 'triton 3\.9'"):
        budgets.write(tmp_path, FORGE, [unnamed])
