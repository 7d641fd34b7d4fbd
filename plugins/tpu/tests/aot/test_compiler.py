"""The real TPU compiler, for every TPU that it has, without one. Needs `polysilicon-tpu[aot]`.

Nothing is skipped here: whoever asks for this folder wants the compiler, and a missing one fails.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polysilicon.api import PolysiliconError
from polysilicon_tpu import kernels
from polysilicon_tpu.chips import CHIPS, LANES, SMEM_BYTES, SUBLANES, Chip
from polysilicon_tpu.compiled import Program, compile_programs
from polysilicon_tpu.device import devices
from polysilicon_tpu.kernels.rms_norm import NAME, offline
from polysilicon_tpu.layout import ELEMENTS, TpuTiling

if TYPE_CHECKING:
    from polysilicon.api import Compiled, Device

#: Written by `polysilicon compile --device tpu:ARCH --write-budget` this folder.
BUDGETS = Path(kernels.__file__).parent
ARCHES = [chip.arch for chip in CHIPS]


def _device(arch: str) -> Device:
    return devices(f"tpu:{arch}")[0]


@functools.cache
def _kernel(arch: str) -> tuple[Compiled, ...]:
    return tuple(offline(_device(arch)))


@pytest.mark.parametrize("arch", ARCHES)
def test_kernel_compiles_in_every_variant(arch: str) -> None:
    assert {one.variant: one.problems for one in _kernel(arch)} == {
        f"hidden {hidden} {dtype}": ()
        for hidden in (576, 4096, 8192)
        for dtype in ("bfloat16", "float32")
    }


@pytest.mark.parametrize("chip", CHIPS, ids=ARCHES)
def test_compiled_kernel_is_in_the_program_and_fits_vector_memory(chip: Chip) -> None:
    for one in _kernel(chip.arch):
        assert one.facts["custom_calls"] == "polysilicon_rms_norm", one.variant
        assert int(one.facts["vmem_bytes"] or 0) <= chip.scoped_vmem_bytes, one.variant


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_cost_what_their_budget_says(arch: str) -> None:
    command = [sys.executable, "-m", "polysilicon", "compile", "--device", f"tpu:{arch}", "--json"]
    ran = subprocess.run(
        [*command, "--check-budget", str(BUDGETS)], capture_output=True, text=True, check=False
    )
    rows = json.loads(ran.stdout)["kernels"]
    assert {row["variant"]: row["problems"] for row in rows if row["problems"]} == {}
    assert (ran.returncode, len(rows)) == (0, 6)


#: Of each rank: what differs in padding, order or tile, then seeded ones.
SHAPES = [
    *((1,), (64,), (127,), (300,), (1000,), (1024,), (5000,)),
    *((1, 1), (1, 4096), (3, 100), (17, 130), (8, 128), (32, 128), (64, 128), (33, 4096)),
    *((4096, 8), (4096, 1), (100, 5), (128, 64), (300, 576), (1023, 576), (16, 1), (64, 64)),
    *((2, 3, 100), (4, 16, 64), (2, 4096, 8), (8, 300, 64)),
    *((10, 16, 8, 64), (100, 16, 2, 128), (8, 10, 32, 64), (8, 100, 32, 128), (1024, 16, 8, 64)),
    (100, 16, 4, 2, 128),
]


def _shapes(seed: int) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    sizes = (1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 96, 100, 127, 128, 129, 256, 576)
    return SHAPES + [tuple(draw.choices(sizes, k=draw.randint(1, 4))) for _ in range(40)]


@pytest.mark.parametrize("arch", ARCHES)
def test_layout_rule_is_the_compilers(arch: str) -> None:
    shapes = _shapes(ARCHES.index(arch))
    asked = " ".join("x".join(map(str, shape)) for shape in shapes)
    answers = compile_programs(
        "layout",
        [
            Program(
                variant=dtype,
                builder="programs:arguments",
                parameters={"shapes": asked, "dtype": dtype},
            )
            for dtype in ELEMENTS
        ],
        _device(arch),
    )
    for answer in answers:
        tilings = [TpuTiling(shape=shape, dtype=answer.variant) for shape in shapes]
        given = str(answer.facts["layout"]).partition(")->")[0].removeprefix("(")
        assert given == ", ".join(tiling.describe() for tiling in tilings), answer.variant
        assert answer.facts["argument_bytes"] == sum(t.padded_bytes for t in tilings)


@pytest.mark.parametrize("arch", ["v5e", "v6e"])
def test_block_that_is_too_large_is_refused_in_the_compilers_words(arch: str) -> None:
    (answer,) = compile_programs(
        NAME,
        [
            Program(
                variant="too wide",
                builder="polysilicon_tpu.kernels.rms_norm_pallas:program",
                parameters={"rows": 1024, "hidden": 1 << 18, "dtype": "float32"},
            )
        ],
        _device(arch),
    )
    (problem,) = answer.problems
    assert problem.startswith("the compiler refuses it: ")
    assert "vmem" in problem


def test_program_without_our_kernel_is_a_problem() -> None:
    (answer,) = compile_programs(
        "none", [Program(variant="plain", builder="programs:fine")], _device("v6e")
    )
    assert answer.facts["custom_calls"] == ""


def test_hanging_program_is_given_up_and_the_next_one_compiled() -> None:
    programs = [
        Program(variant="first", builder="programs:fine"),
        Program(variant="hanging", builder="programs:hangs"),
        Program(variant="last", builder="programs:fine"),
    ]
    answers = compile_programs("none", programs, _device("v6e"), limit=8)
    assert [one.variant for one in answers] == ["first", "hanging", "last"]
    assert answers[1].problems == ("still compiling after 8 s: its blocks are too large",)


def test_compiler_that_dies_costs_only_the_program_it_died_of() -> None:
    programs = [
        Program(variant="deadly", builder="programs:aborts"),
        Program(variant="last", builder="programs:fine"),
    ]
    deadly, last = compile_programs("none", programs, _device("v6e"))
    assert deadly.problems[0].startswith("the compiler ended by signal 6")
    assert (last.variant, last.facts["custom_calls"]) == ("last", "")


def test_process_that_fails_is_one_error() -> None:
    programs = [Program(variant="missing", builder="no_such_module:function")]
    with pytest.raises(PolysiliconError, match="process failed: exit status 1"):
        compile_programs("none", programs, _device("v6e"))


@pytest.mark.parametrize("chip", CHIPS, ids=ARCHES)
def test_facts_of_chips_agree_with_the_table_of_jax(chip: Chip) -> None:
    from jax.experimental.pallas import tpu as pltpu

    version = pltpu.ChipVersion(chip.arch.removeprefix("v") if chip.arch == "v7x" else chip.arch)
    told = pltpu.get_tpu_info_for_chip(version, chip.cores)
    assert (told.vmem_capacity_bytes, told.smem_capacity_bytes) == (chip.vmem_bytes, SMEM_BYTES)
    assert (told.num_lanes, told.num_sublanes) == (LANES, SUBLANES)
    assert (told.mxu_column_size, told.num_mxus) == (chip.mxu, chip.mxus)
    assert told.mem_bw_bytes_per_second * chip.cores == chip.memory_bytes_per_second
    # JAX rounds, and states the sizes and rates of one core.
    assert told.hbm_capacity_bytes * chip.cores == pytest.approx(chip.memory_bytes, rel=0.02)
    for name in chip.native_formats:
        assert told.is_matmul_supported(name, name), name
