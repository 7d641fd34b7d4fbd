"""Core's kernels in Triton, compiled for every chip that a plugin claims; nothing of it runs."""

import json
import os
import subprocess
import sys

import pytest

OPS = ("rms_norm_quant", "silu_and_mul_quant", "gated_delta_rule")
NVIDIA = [f"nvidia:{arch}" for arch in ("sm80", "sm89", "sm90", "sm100", "sm120")]
AMD = [f"amd:{arch}" for arch in ("gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")]


@pytest.mark.parametrize("chip", [*NVIDIA, *AMD])
def test_every_variant_passes_the_gate_of_its_chip(chip):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "polysilicon", "compile", *OPS, "--json", "--device", chip],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr
    rows = json.loads(ran.stdout)["kernels"]
    assert {row["variant"]: row["problems"] for row in rows if row["problems"]} == {}
    assert {row["kernel"] for row in rows} == {f"{op}.triton" for op in OPS}
    # Three sizes of each op: rows in int8 by token and in groups at the least, in float8 where that
    # is native; heads with keys as given and of unit length.
    assert len(rows) >= 18
    assert ran.returncode == 0
