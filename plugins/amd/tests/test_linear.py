"""What the conformance suite can't know of the linear kernel: tiles, claims, compiled code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from polysilicon.api import Format, Problem, tolerance
from polysilicon_amd.chips import ARCHES, CHIPS
from polysilicon_amd.device import absent
from polysilicon_amd.kernels import linear
from polysilicon_amd.kernels.linear_tiles import MOST_SIZE, TILES, tile_for, workspace_bytes
from polysilicon_amd.layout import pack_shuffle16
from polysilicon_amd.plugin import polysilicon_kernels

ARCHITECTURES = ("gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
#: The Triton whose figures `linear.amd_shuffled.budget.json` holds; another makes other code.
BUDGETED = "3.9."
#: LDS holds nothing but the activations in these variants.
FEW_TOKENS = ("1 ×", "7 ×", "64 ×")


# --- values, in the interpreter ------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("tokens", "out", "width"),
    [
        (1, 48, 5120),  # one tile of outputs: the sum is split
        (17, 130, 257),  # the second tile, ragged in every dim
        (67, 257, 127),  # the third
    ],
)
def test_every_architectures_tiles_agree_with_the_reference(
    arch: str, tokens: int, out: int, width: int
) -> None:
    source = torch.Generator().manual_seed(7)
    x, weight, bias = (
        torch.randn(*shape, generator=source).to(torch.bfloat16)
        for shape in ((tokens, width), (out, width), (out,))
    )
    y = torch.full((tokens, out), torch.nan, dtype=torch.bfloat16)
    linear.launch(x, pack_shuffle16(weight), bias, y, arch)
    wanted = x.double() @ weight.double().t() + bias.double()
    relative, absolute = tolerance(torch.bfloat16, width)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(
        y.double(), wanted, rtol=relative, atol=max(absolute, relative * scale)
    )


def test_split_sums_are_the_same_bits_each_time() -> None:
    x, weight = torch.randn(1, 5120).half(), pack_shuffle16(torch.randn(48, 5120).half())
    one, other = (linear.linear(x, weight, None, (48, 5120)) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tiles", "steps", "units", "splits"),
    [
        (1, 40, 304, 10),  # as many as have four steps each
        (64, 32, 304, 8),
        (1, 400, 304, 16),  # no more than 16
        (700, 400, 304, 1),  # every compute unit has work without
        (1, 3, 304, 1),
    ],
)
def test_sums_are_split_where_compute_units_would_be_idle(
    tiles: int, steps: int, units: int, splits: int
) -> None:
    assert linear.split_count(tiles, steps, units) == splits


@pytest.mark.parametrize("stride", [MOST_SIZE + 8, 2])
def test_rows_that_the_kernel_cannot_address_are_copied(stride: int) -> None:
    # Far apart, beyond 32-bit offsets; and every other element.
    inner = 1 if stride > 2 else 2
    x = torch.ones(2 * max(stride, 64), dtype=torch.float16).as_strided((2, 32), (stride, inner))
    y = linear.linear(x, pack_shuffle16(torch.ones(16, 32).half()), None, (16, 32))
    assert torch.equal(y, torch.full((2, 16), 32.0).half())


# --- claims --------------------------------------------------------------------------------------


def _kernel(chip: str) -> Any:
    (kernel,) = polysilicon_kernels(absent(chip))
    return kernel


def _problem(**facts: int) -> Problem:
    return Problem(op="linear", dtype="bfloat16", facts=facts)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernel_serves_the_claimed_architectures_for_any_number_of_tokens(arch: str) -> None:
    kernel = _kernel(f"amd:{arch}")
    assert (kernel.device, kernel.tokens) == (f"amd:{arch}", None)
    assert kernel.supports(_problem(**{"in": 4096, "out": 4096})) is None
    assert "never run on hardware" in kernel.note


def test_kernel_says_why_it_does_not_serve() -> None:
    supports = _kernel("amd:mi300x").supports
    stored = Format(dtype="int8", logical="scaled", scale_dtype="float32", granularity="channel")
    quantised = Problem(op="linear", dtype="bfloat16", formats={"weight": stored})
    assert "weight is scaled int8" in supports(quantised)
    assert "in is 16777216: more than" in supports(_problem(**{"in": 2 * MOST_SIZE}))
    assert "none for gfx90a" in _kernel("amd:gfx90a").supports(_problem())


def test_parts_of_split_sums_fit_the_declared_workspace() -> None:
    for arch, tiles in TILES.items():
        units = CHIPS[ARCHES[arch].typical].compute_units
        for tile in tiles:
            programs = linear.split_count(1, 1 << 20, units)
            assert programs * tile.m * tile.n * 4 <= workspace_bytes(arch)


def test_tiles_rise_to_any_number_of_tokens() -> None:
    for arch in ARCHITECTURES:
        assert [tile_for(arch, tokens).m for tokens in (1, 16, 17, 64, 65, 1 << 20)] == [
            *(16, 16, 64, 64, 128, 128)
        ]


# --- what AMD's compiler makes of it: compiled offline, not run ----------------------------------


def _without_interpreter() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@cache
def _compiled(arch: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of `polysilicon compile`, and what it lists."""
    command = [sys.executable, "-m", "polysilicon", "compile", "linear", "--json"]
    command += ["--device", f"amd:{arch}"]
    if triton.__version__.startswith(BUDGETED):
        command += ["--check-budget", str(Path(linear.__file__).parent)]
    ran = subprocess.run(command, env=_without_interpreter(), capture_output=True, text=True)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)["kernels"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_a_problem(arch: str) -> None:
    status, rows = _compiled(arch)
    assert [row["problems"] for row in rows if row["problems"]] == []
    assert status == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_products_use_the_matrix_instruction_of_their_dtype(arch: str) -> None:
    _, rows = _compiled(arch)
    products = [row for row in rows if row["variant"].endswith("_shuffled")]
    assert len(products) == 7
    unit = ARCHES[arch].matrix_unit
    for row in products:
        short = "bf16" if "bfloat16" in row["variant"] else "f16"
        instruction = row["facts"]["matrix_instruction"]
        assert instruction.startswith(f"v_{unit}_f32_16x16x"), row["variant"]
        assert instruction.split("×")[0].endswith(f"_{short}"), row["variant"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_of_few_tokens_do_not_pass_lds(arch: str) -> None:
    _, rows = _compiled(arch)
    for row in rows:
        if row["variant"].startswith(FEW_TOKENS):
            tile = tile_for(arch, int(row["variant"].split()[0]))
            activations = tile.m * tile.k * 2 * tile.stages
            # CDNA4 pads its rows of LDS by a few hundred bytes.
            assert row["facts"]["shared_bytes"] <= activations * 1.05, row["variant"]


# --- formats -------------------------------------------------------------------------------------


@cache
def _products() -> dict[str, dict[str, list[str]]]:
    program = Path(__file__).with_name("fp8_products.py")
    ran = subprocess.run(
        [sys.executable, str(program), *ARCHITECTURES],
        env=_without_interpreter(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, list[str]]] = json.loads(ran.stdout)
    return found


def _is_fp8(instruction: str) -> bool:
    return any(part in instruction for part in ("fp8", "bf8", "f8f6f4"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_native_formats_are_those_that_compile_to_fp8_instructions(arch: str) -> None:
    for dtype, instructions in _products()[arch].items():
        native = dtype in ARCHES[arch].native_formats
        assert any(map(_is_fp8, instructions)) == native, (dtype, instructions)
