"""Core's programs in Helion on a CPU: what they mean, in two ways, and what is exported of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helion", reason="needs Helion: python -m nox -s helion")

HERE = Path(__file__).parent
OPS = ("rms_norm_quant", "silu_and_mul_quant")


def _ran(*arguments: str, **environment: str) -> Any:
    """What a script of this folder prints, in a process whose environment Helion reads."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("op", "least"),
    [("rms_norm_quant", 300), ("silu_and_mul_quant", 300), ("gated_delta_rule", 60)],
)
def test_every_check_of_the_suite_passes_in_reference_mode(op: str, least: int) -> None:
    script = str(HERE / "reference_mode.py")
    checks, bad = _ran(script, f"{op}.helion", "bfloat16", HELION_INTERPRET="1")
    assert bad == []
    assert checks > least


@pytest.mark.parametrize("op", OPS)
def test_the_programs_are_right_in_the_other_backends_interpreter(op: str) -> None:
    environment = {"HELION_BACKEND": "pallas", "HELION_PALLAS_INTERPRET": "1"}
    told = _ran(str(HERE / "pallas_interpreter.py"), op, **environment)
    assert {name: text for name, text in told.items() if text} == {}
    assert len(told) == 3


def test_what_is_committed_is_what_the_sources_export() -> None:
    command = [sys.executable, "-m", "polysilicon.kernels.helion.export", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
