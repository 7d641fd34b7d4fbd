"""Kernels compiled for chips that are not here, by the real compiler, through their wrapper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: python -m nox -s offline")

import torch
import triton
from packaging.version import Version

from polysilicon.api import CompiledTriton, ToolchainError, compile_triton

from . import kernels

GFX942 = {"backend": "hip", "arch": "gfx942", "warp_size": 64}
GFX1100 = {"backend": "hip", "arch": "gfx1100", "warp_size": 32}
SM80, SM90, SM100 = ({"backend": "cuda", "arch": arch, "warp_size": 32} for arch in (80, 90, 100))
BLOCKS = {"BM": 64, "BN": 64, "BK": 32}


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _one(launch: Any, target: dict[str, Any]) -> CompiledTriton:
    (compiled,) = compile_triton(launch, **target)
    return compiled


def _multiply(**how: Any) -> torch.Tensor:
    return kernels.multiply(_meta(300, 512), _meta(512, 256), **how)


@pytest.mark.parametrize(
    ("target", "binary", "assembly", "evidence"),
    [
        (GFX942, "hsaco", "amdgcn", (r"v_mfma_f32_\w*bf16", r"\.vgpr_count:\s+[1-9]")),
        (GFX1100, "hsaco", "amdgcn", (r"v_wmma_f32_\w*bf16", r"\.vgpr_count:\s+[1-9]")),
        (SM80, "cubin", "ptx", (r"mma\.sync\.\S*bf16", r"\.target sm_80")),
        (SM90, "cubin", "ptx", (r"wgmma\.mma_async\S*bf16", r"\.target sm_90a")),
        (SM100, "cubin", "ptx", (r"tcgen05\.mma", r"\.target sm_100a")),
    ],
    ids=["gfx942", "gfx1100", "sm80", "sm90", "sm100"],
)
def test_wrapper_compiles_for_a_chip_that_is_not_here(
    target: dict[str, Any], binary: str, assembly: str, evidence: tuple[str, ...]
) -> None:
    made = _one(lambda: _multiply(**BLOCKS), target)
    assert (made.error, made.diagnostics) == ("", "")
    assert (made.name, made.grid, made.constants) == ("matmul", (5, 4), BLOCKS)
    assert (made.num_warps, made.shared_bytes > 0) == (4, True)
    assert made.toolchain == "triton " + ".".join(triton.__version__.split(".")[:2])
    assert len(made.asm[binary]) > 1000
    for pattern in evidence:
        assert re.search(pattern, str(made.asm[assembly])), pattern


def test_each_target_gets_its_own_binary_in_one_process() -> None:
    targets = (GFX942, GFX1100, GFX942)
    asked = [target["arch"] for target in targets]
    made = [_one(lambda: _multiply(**BLOCKS), target) for target in targets]
    found = [re.search(r'amdgcn_target ".*-(gfx\w+)"', str(m.asm["amdgcn"])) for m in made]
    assert [match and match[1] for match in found] == asked


def test_same_specialisation_is_compiled_once_and_others_apart() -> None:
    def launch() -> None:
        _multiply(**BLOCKS)
        _multiply(**BLOCKS)
        _multiply(**BLOCKS | {"BK": 64})

    made = compile_triton(launch, **SM80)
    assert [compiled.constants["BK"] for compiled in made] == [32, 64]


@pytest.mark.parametrize(
    ("kernel", "extra", "tuned"),
    [
        (kernels.tuned, {"BK": 32}, [(32, 4), (64, 4), (128, 4)]),
        (kernels.heuristics_over_tuned, {}, [(32, 4), (64, 4), (128, 4)]),
        (kernels.tuned_over_heuristics, {}, [(64, 4), (64, 8)]),
    ],
    ids=["tuned", "heuristics over tuned", "tuned over heuristics"],
)
def test_autotuned_kernel_is_compiled_in_every_config(
    kernel: Any, extra: dict[str, int], tuned: list[tuple[int, int]]
) -> None:
    made = compile_triton(lambda: _multiply(kernel=kernel, **extra), **SM80)
    assert [(m.constants["BN"], m.num_warps) for m in made] == tuned
    assert {m.constants["BK"] for m in made} == {32}
    assert [m.grid[1] for m in made] == [256 // m.constants["BN"] for m in made]


def test_hook_of_a_config_runs_before_its_compilation() -> None:
    kernels.tuned_hooks.clear()
    compile_triton(lambda: _multiply(kernel=kernels.tuned, BK=32), **SM80)
    assert kernels.tuned_hooks == [32, 64, 128]


def test_strides_and_alignment_specialise_as_on_the_chip() -> None:
    def ttir(b: torch.Tensor) -> str:
        return str(_one(lambda: kernels.multiply(_meta(300, 512), b, **BLOCKS), SM80).asm["ttir"])

    row_major, column_major = ttir(_meta(512, 256)), ttir(_meta(256, 512).t())
    assert row_major != column_major
    shifted = ttir(torch.as_strided(_meta(512 * 256 + 1), (512, 256), (256, 1), 1))
    assert shifted.count("tt.divisibility = 16") == row_major.count("tt.divisibility = 16") - 1


def test_tensor_of_many_gigabytes_costs_nothing_and_needs_64_bit_addresses() -> None:
    def ttir(tokens: int) -> str:
        x = _meta(tokens, 4096)
        grid = (triton.cdiv(x.numel(), 1024),)
        launch = lambda: kernels.copy[grid](x, x, x.numel(), BLOCK=1024)  # noqa: E731
        return str(_one(launch, GFX942).asm["ttir"])

    assert "tt.pointer_range = 32" in ttir(1 << 10)
    assert "tt.pointer_range = 32" not in ttir(1 << 20)


ENDS_THE_PROCESS = Version(triton.__version__) < Version("3.9")
FOREIGN = """
import kernels, torch
from polysilicon.api import compile_triton
x = torch.empty(64, device="meta")
launch = lambda: kernels.ptx_only[(1,)](x, x, BLOCK=64)
print(compile_triton(launch, backend="hip", arch="gfx942", warp_size=64)[0].diagnostics)
"""


def test_foreign_assembly_is_told_even_by_a_compiler_that_ends_the_process(tmp_path: Path) -> None:
    said = tmp_path / "said"
    here = os.pathsep.join((str(Path(__file__).parent), *filter(None, sys.path)))
    with said.open("w+") as file:
        command = [sys.executable, "-c", FOREIGN]
        env = {**os.environ, "PYTHONPATH": here}
        done = subprocess.run(command, stdout=file, stderr=file, env=env, check=False)
    assert done.returncode == ENDS_THE_PROCESS
    assert "allocate output register for constraint 'f'" in said.read_text()


@pytest.mark.skipif(ENDS_THE_PROCESS, reason="this Triton ends the process instead")
def test_foreign_assembly_is_told_each_time() -> None:
    x = torch.empty(64, device="meta")
    for _ in range(2):  # what a cache hands back would tell nothing the second time
        made = _one(lambda: kernels.ptx_only[(1,)](x, x, BLOCK=64), GFX942)
        assert made.error == ""
        assert "could not allocate output register" in made.diagnostics
    assert _one(lambda: kernels.ptx_only[(1,)](x, x, BLOCK=64), SM90).diagnostics == ""


def test_kernel_that_does_not_compile_is_an_error_of_its_own() -> None:
    x = torch.empty(64, device="meta")

    def launch() -> None:
        kernels.refused[(1,)](x, BLOCK=32)
        kernels.copy[(1,)](x, x, 64, BLOCK=64)

    bad, good = compile_triton(launch, **SM80)
    assert "a block is too small" in bad.error
    assert dict(bad.asm) == {}
    assert (good.error, "cubin" in good.asm) == ("", True)


def test_grid_that_fails_is_an_error_of_its_kernel() -> None:
    x = torch.empty(64, device="meta")
    made = _one(lambda: kernels.copy[lambda meta: (64 // 0,)](x, x, 64, BLOCK=64), SM80)
    assert made.error.startswith("ZeroDivisionError")


def test_triton_is_left_as_it_was_even_when_the_wrapper_raises() -> None:
    def state() -> tuple[Any, ...]:
        jit, autotuner = triton.runtime.jit.JITFunction, triton.runtime.Autotuner
        return triton.runtime.driver._active, jit.run, autotuner.run, triton.knobs.cache.dir

    before = state()

    def launch() -> None:
        _multiply(**BLOCKS)
        raise LookupError("of the wrapper")

    with pytest.raises(LookupError, match="of the wrapper"):
        compile_triton(launch, **SM80)
    assert state() == before
    assert not any(index >= 1 << 16 for index in kernels.matmul.device_caches)


def test_launching_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"launch\(\) launched no Triton kernel"):
        compile_triton(lambda: None, **SM80)


def test_unknown_backend_names_those_that_are_installed() -> None:
    with pytest.raises(ToolchainError, match="no backend 'metal'; installed are amd, nvidia"):
        compile_triton(lambda: None, backend="metal", arch="m1", warp_size=32)


def test_interpreting_process_refuses_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ToolchainError, match="TRITON_INTERPRET=1 is set"):
        compile_triton(lambda: None, **SM80)
