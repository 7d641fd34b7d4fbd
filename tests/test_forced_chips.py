"""A chip that is not here explains and compiles, and refuses to run with what to do instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from golden_choices import CHIPS
from typer.testing import CliRunner

from polysilicon.cli import build

if TYPE_CHECKING:
    from click.testing import Result

ABSENT = [chip for chip in CHIPS if chip != "cpu"]
#: One chip by its architecture, and one of each plugin for what is slow.
ONE_EACH = ("nvidia:sm90", "amd:gfx942", "spyre", "tpu:v6e")


def _polysilicon(*words: str) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(build(words[0]), list(words))


@pytest.mark.parametrize("chip", ABSENT)
def test_run_refuses(chip: str) -> None:
    done = _polysilicon("run", "hello", "--device", chip)
    assert done.exit_code == 2
    [said] = done.stderr.strip().splitlines()
    assert said.startswith(f"error: device {chip} is forced and not on this machine: explain and")


def test_run_refuses_what_the_environment_forces() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polysilicon", "run", "hello"],
        env={**os.environ, "POLYSILICON_DEVICE": "nvidia:h200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "error: device nvidia:h200 is forced and not on this machine" in done.stderr


@pytest.mark.parametrize("chip", ONE_EACH)
def test_explain_answers(chip: str) -> None:
    done = _polysilicon("explain", "rms_norm", "--device", chip, "--dtype", "bfloat16", "--json")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["device"].partition(":")[0] == chip.partition(":")[0]
    assert [row["kernel"] for row in answer["candidates"] if row["chosen"]]


@pytest.mark.parametrize(
    ("unknown", "known"),
    [("nvidia:h2000", "h200"), ("amd:mi300", "mi300x"), ("spyre:two", "sim"), ("tpu:v5", "v5e")],
)
def test_an_unknown_chip_is_told_with_those_that_the_plugin_knows(unknown: str, known: str) -> None:
    done = _polysilicon("explain", "rms_norm", "--device", unknown)
    assert done.exit_code == 2
    assert unknown.partition(":")[2] in done.stderr
    assert known in done.stderr


@pytest.mark.parametrize("chip", ONE_EACH)
def test_compile_says_where_there_is_nothing_to_compile(chip: str) -> None:
    done = _polysilicon("compile", "sampling", "--device", chip)
    assert done.exit_code == 2
    assert "no kernel of sampling for" in done.stderr
