"""What the compiler makes of the kernels, for chips that are not here; nothing of it runs."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import polysilicon_nvidia
from polysilicon.api import CompiledTriton
from polysilicon_nvidia.compiled import gate
from polysilicon_nvidia.device import absent

SIZES = (64, 128, 256)
BUDGETS = Path(polysilicon_nvidia.__file__).parent / "kernels"
GOOD = {
    "registers": 80,
    "spills": 0,
    "shared_bytes": 1024,
    "matrix_instruction": "mma.sync",
    "code_bytes": 4096,
    "stores": 2,
}


@pytest.mark.skipif(
    not version("triton").startswith("3.9."), reason="tiles and budgets are those of Triton 3.9"
)
@pytest.mark.parametrize(
    ("arch", "prefill"),
    [
        ("sm80", "mma.sync"),
        ("sm89", "mma.sync"),
        ("sm90", "wgmma.mma_async"),
        ("sm100", "tcgen05.mma"),
        ("sm120", "mma.sync"),
    ],
)
def test_every_variant_passes_the_gate_of_its_chip_within_its_budget(arch, prefill):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "polysilicon", "compile", "paged_attention", "--json"]
    ran = subprocess.run(
        [*command, "--device", f"nvidia:{arch}", "--check-budget", str(BUDGETS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout, ran.stderr
    made = {row["variant"]: row for row in json.loads(ran.stdout)["kernels"]}
    assert {name: row["problems"] for name, row in made.items() if row["problems"]} == {}
    assert ran.returncode == 0
    used = {name: row["facts"]["matrix_instruction"] for name, row in made.items()}
    for size in SIZES:
        assert used[f"decode, head {size}, bfloat16: attend"] == "mma.sync"
        assert used[f"prefill, head {size}, bfloat16: attend"] == prefill
        assert used[f"decode, head {size}, bfloat16: combine"] is None


@pytest.mark.parametrize(
    ("fact", "problem"),
    [
        ({"stores": 0}, "stores nothing: its result was optimised away"),
        ({"spills": 8}, "spills 8 bytes of registers a thread: make its tile smaller"),
        ({"shared_bytes": 101377}, "takes 101377 bytes of shared memory, sm89 has 101376"),
        ({"matrix_instruction": None}, "multiplies by None, expected mma.sync"),
        ({"code_bytes": 65537}, "has 65537 bytes of code, expected at most 65536"),
    ],
)
def test_the_gate_says_what_is_wrong(fact, problem):
    made = CompiledTriton(name="attend", toolchain="", seconds=1.0)
    device = absent("nvidia:sm89")
    assert list(gate(made, GOOD, "mma.sync", device)) == []
    assert list(gate(made, GOOD | fact, "mma.sync", device)) == [problem]


def test_the_gate_heeds_what_the_compiler_says():
    device = absent("nvidia:h200")
    failed = CompiledTriton(name="attend", toolchain="", seconds=1.0, error="no such instruction")
    assert list(gate(failed, {}, None, device)) == ["does not compile: no such instruction"]
    odd = CompiledTriton(name="attend", toolchain="", seconds=1.0, diagnostics="odd")
    assert list(gate(odd, GOOD, "mma.sync", device)) == ["the compiler says: odd"]
