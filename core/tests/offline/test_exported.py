"""Core's Triton kernels, exported from Helion: right by Triton's interpreter, without Helion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: python -m nox -s offline")

SCRIPT = Path(__file__).parent / "exported_kernels.py"


@pytest.mark.parametrize(
    ("kernel", "most", "dtypes", "least"),
    [
        # Each row has a program of its own, which takes 20 ms here: some rows are enough.
        ("rms_norm_quant.triton", 10, ("bfloat16",), 300),
        ("silu_and_mul_quant.triton", 10, ("float16",), 250),
        ("gated_delta_rule.triton", 28, ("bfloat16",), 50),
    ],
)
def test_every_check_of_the_suite_passes_in_the_interpreter(
    kernel: str, most: int, dtypes: tuple[str, ...], least: int
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kernel, str(most), *dtypes],
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for dtype, (checks, bad) in json.loads(done.stdout).items():
        assert bad == [], dtype
        assert checks > least


def test_nothing_of_helion_is_left_in_what_was_exported() -> None:
    code = (
        "import sys; sys.modules['helion'] = None\n"
        "import polysilicon.kernels.triton.gated_delta_rule\n"
        "import polysilicon.kernels.triton.rms_norm_quant\n"
        "import polysilicon.kernels.triton.silu_and_mul_quant\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
