"""The gates, on compilers' answers that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import pytest

from polysilicon.api import CompiledTriton
from polysilicon_amd.chips import ARCHES
from polysilicon_amd.compiled import asm_facts, occupancy, problems

_ASM = """
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[6:7], v[0:3]
	buffer_store_short v0, v1, s[0:3], 0 offen
; codeLenInByte = 1564
; Occupancy: 8
    .agpr_count:     4
    .private_segment_fixed_size: 0
    .sgpr_count:     40
    .sgpr_spill_count: 0
    .vgpr_count:     58
    .vgpr_spill_count: 0
"""


def _compiled(asm: str = _ASM, **fields: Any) -> CompiledTriton:
    stated: dict[str, Any] = {"num_warps": 4, "toolchain": "triton 3.9", "asm": {"amdgcn": asm}}
    return CompiledTriton(name="kernel", seconds=0.1, **{"shared_bytes": 4096, **stated, **fields})


def _problems(made: CompiledTriton) -> list[str]:
    arch = ARCHES["gfx942"]
    facts = {} if made.error else asm_facts(made, arch)
    return list(problems(made, facts, arch, matrix=True))


def test_facts_are_read_from_the_assembly() -> None:
    facts = asm_facts(_compiled(), ARCHES["gfx942"])
    assert facts == {
        "registers": 58,
        "accumulators": 4,
        "scalar_registers": 40,
        "spills": 0,
        "scalar_spills": 0,
        "scratch_bytes": 0,
        "shared_bytes": 4096,
        "occupancy": 8,
        "code_bytes": 1564,
        "stores": 1,
        "matrix_instruction": "v_mfma_f32_16x16x16_bf16×2",
        "toolchain": "triton 3.9",
    }


def test_nothing_is_against_a_kernel_within_the_limits() -> None:
    assert _problems(_compiled()) == []


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (_compiled(error="CompilationError: no"), "refuses it: CompilationError: no"),
        (_compiled(diagnostics="could not allocate"), "said: could not allocate"),
        (_compiled(_ASM.replace("buffer_store", "buffer_load")), "stores nothing"),
        (_compiled(_ASM.replace("vgpr_spill_count: 0", "vgpr_spill_count: 72")), "72 spills"),
        (_compiled(shared_bytes=131072), "131072 B of LDS, gfx942 has 65536"),
        (_compiled(_ASM.replace("v_mfma", "v_fma")), "no mfma instruction: none at all"),
        (_compiled(_ASM.replace("v_mfma", "v_wmma")), "no mfma instruction: v_wmma"),
        (_compiled(_ASM.replace("1564", "307200")), "307200 B of code"),
    ],
)
def test_each_gate_catches_what_the_compiler_lets_through(made: CompiledTriton, says: str) -> None:
    (problem,) = _problems(made)
    assert says in problem


@pytest.mark.parametrize(
    ("arch", "shared", "warps", "waves"),
    [
        ("gfx942", 0, 4, 8),  # no LDS: what the registers leave room for
        ("gfx942", 32768, 4, 2),  # two workgroups of one wave a SIMD
        ("gfx950", 32768, 4, 5),  # 160 KB
        ("gfx1100", 32768, 4, 4),  # RDNA's two compute units share 128 KB
        ("gfx942", 65536, 8, 2),
    ],
)
def test_occupancy_counts_lds_which_the_compiler_leaves_out(
    arch: str, shared: int, warps: int, waves: int
) -> None:
    assert occupancy(8, shared, warps, ARCHES[arch]) == waves
