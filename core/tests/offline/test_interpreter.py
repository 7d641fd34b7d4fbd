"""Triton's interpreter with bfloat16 and float8 mended; each process of its own, as it must be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: python -m nox -s offline")


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What kernels gave that were interpreted in one other process."""
    done = _python(str(Path(__file__).parent / "interpreted.py"))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_arithmetic_in_float32_and_the_store_as_bfloat16_are_right(results: dict[str, Any]) -> None:
    assert results["add"] is True
    assert results["sum"] < 1e-5


def test_dot_of_bfloat16_is_right(results: dict[str, Any]) -> None:
    assert results["dot"] < 2**-8  # one rounding to bfloat16


def test_casts_of_bfloat16_and_to_float8_equal_torch_bit_for_bit(results: dict[str, Any]) -> None:
    assert [cast for cast, right in results["casts"].items() if not right] == []


@pytest.mark.parametrize("what", ["arithmetic", "reduction", "negation"])
def test_arithmetic_on_bfloat16_raises_instead_of_being_wrong(
    results: dict[str, Any], what: str
) -> None:
    assert "the interpreter computes on bfloat16 as on integers" in results[what]


def test_canary_dies_where_the_interpreter_is_not_mended() -> None:
    code = "from polysilicon.testing.triton_canary import check; check()"
    done = _python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "says that 2.5 + 2.0 in bfloat16 is" in done.stderr


def test_canary_dies_where_casts_to_float8_are_not_mended() -> None:
    code = (
        "from polysilicon.testing import triton_interpreter as t; t._mend_float8 = lambda i: None\n"
        "t.activate()"
    )
    done = _python("-c", code)
    assert done.returncode == 1
    assert "in torch.float8_e4m3fn, expected" in done.stderr


def test_activating_after_triton_was_imported_is_refused() -> None:
    code = "import triton; from polysilicon.testing import triton_interpreter as t\nt.activate()"
    done = _python("-c", code)
    assert done.returncode == 1
    assert "Triton is already imported, and decides at import" in done.stderr
