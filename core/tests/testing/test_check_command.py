"""`polysilicon check`: what is right, what is wrong, and what can't be checked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from polysilicon import cli

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result

pytestmark = pytest.mark.usefixtures("fresh")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.build("check"), ["check", *arguments])


def test_portable_kernels_are_right_and_counted_by_sample() -> None:
    result = _run("linear", "--device", "cpu", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["schema"], told["device"]) == (1, "cpu")
    row = next(row for row in told["kernels"] if row["kernel"] == "linear.torch")
    assert row["passed"] > 20
    assert (row["failed"], row["skipped"], row["failures"]) == (0, 0, [])


def test_wrong_kernel_is_shown_with_its_first_failure_and_status_1(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("mutants")
    monkeypatch.setenv("COLUMNS", "200")
    result = _run("silu_and_mul", "--device", "mutants")
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    assert "silu_and_mul.writes_input" in shown
    assert "arguments: changed its argument x" in shown
    assert "6 kernels × dtypes on mutants:m1: 3 wrong" in shown


def test_kernel_that_no_sample_can_judge_is_not_called_wrong(install: Callable[..., None]) -> None:
    install("mutants")
    told = json.loads(_run("lm_head", "--device", "mutants", "--json").stdout)
    row = next(row for row in told["kernels"] if row["kernel"] == "lm_head.claims_nothing")
    assert (row["passed"], row["failed"]) == (0, 0)
    assert row["skipped"] > 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nosuch",), "there is no op 'nosuch': one of rms_norm"),
        (("--device", "nosuch"), "there is no device 'nosuch'"),
    ],
)
def test_mistakes_are_one_line_with_status_2(arguments: tuple[str, ...], text: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_check_needs_no_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "sys.argv = ['polysilicon', 'check', 'embedding']\n"
        "from polysilicon.cli import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "0 wrong" in ran.stdout
