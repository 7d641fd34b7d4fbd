"""The Pallas kernel in the strict interpreter, lowered for TPUs without their compiler, refusals.

OpSuite compares it with the float64 reference in the fast interpreter. The strict one simulates
vector memory: a read out of bounds raises, and what nobody wrote is NaN.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from polysilicon.api import DeviceError, KernelError, Problem
from polysilicon_tpu import blocks, runtime
from polysilicon_tpu.kernels.rms_norm import rms_norm
from polysilicon_tpu.plugin import KERNELS

(KERNEL,) = KERNELS


def _reference(x: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normed if weight is None else normed * (weight.double() + offset)


# 300 rows: one block and a part of one. 1023 of 96: rows along the lanes. 8 of 200: a partial tile.
@pytest.mark.parametrize(("rows", "hidden"), [(300, 256), (1023, 96), (200, 96), (8, 200), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_strict_interpreter_agrees_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, rows: int, hidden: int, dtype: torch.dtype, offset: float
) -> None:
    monkeypatch.setenv(runtime.INTERPRET, "strict")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = torch.randn(hidden, generator=generator).to(dtype)
    result = rms_norm(x, weight, 1e-6, offset)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    torch.testing.assert_close(
        result.double(),
        _reference(x, weight, offset),
        rtol=2e-5 if dtype == torch.float32 else 2**-7,
        atol=1e-5,
    )


def test_norm_without_weight_in_the_strict_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.INTERPRET, "strict")
    x = torch.randn(5, 130, generator=torch.Generator().manual_seed(0))
    result = rms_norm(x, None, 1e-6)
    torch.testing.assert_close(result.double(), _reference(x, None, 0.0), rtol=2e-5, atol=1e-5)


def test_parameter_that_wants_a_gradient_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.INTERPRET, "fast")
    weight = torch.nn.Parameter(torch.ones(64))
    with torch.no_grad():
        assert rms_norm(torch.ones(2, 64), weight, 0.0).tolist() == [[1.0] * 64] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 576), (1023, 576), (512, 4096), (17, 31)])
@pytest.mark.parametrize("weight", [True, False])
def test_kernel_lowers_for_a_tpu_without_its_compiler(
    rows: int, hidden: int, dtype: str, weight: bool
) -> None:
    import jax

    from polysilicon_tpu.kernels.rms_norm_pallas import CALL, program

    function, arguments = program(rows=rows, hidden=hidden, dtype=dtype, weight=weight)
    specs = [jax.ShapeDtypeStruct(*argument) for argument in arguments]
    lowered = jax.export.export(jax.jit(function), platforms=["tpu"])(*specs).mlir_module()
    assert "tpu_custom_call" in lowered
    assert CALL in lowered


@pytest.mark.parametrize(("itemsize", "widest"), [(2, 131_072), (4, 87_296)])
def test_rows_that_fit_no_block_are_left_to_others(itemsize: int, widest: int) -> None:
    assert blocks.too_wide(widest, itemsize) is None
    assert "of vector memory" in (blocks.too_wide(widest + 1, itemsize) or "")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("hidden", [1, 576, 4096, 8192, 60_000])
@pytest.mark.parametrize("rows", [1, 7, 8, 1000, 1 << 20])
def test_blocks_are_all_rows_or_whole_tiles_that_fit(rows: int, hidden: int, itemsize: int) -> None:
    block = blocks.block_rows(rows, hidden, itemsize)
    assert block == rows or block % 8 == 0
    assert block * blocks.bytes_per_row(hidden, itemsize) <= 16 << 20


PROBLEM = Problem(op="rms_norm", dtype="bfloat16", facts={"hidden": 576})


def _supports(problem: Problem = PROBLEM) -> str | None:
    assert KERNEL.supports is not None
    return KERNEL.supports(problem)


def _installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: name if name in names else None)


def test_kernel_is_refused_where_it_can_run_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(runtime.INTERPRET, raising=False)
    _installed(monkeypatch, "jax")
    assert "pip install 'polysilicon-tpu[runtime]'" in (_supports() or "")
    _installed(monkeypatch, "jax", "torch_tpu")
    assert _supports() is None


def test_interpreter_needs_only_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.INTERPRET, "fast")
    _installed(monkeypatch)
    assert "pip install 'polysilicon-tpu[interpret]'" in (_supports() or "")
    _installed(monkeypatch, "jax")
    assert _supports() is None


def test_unknown_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.INTERPRET, "1")
    with pytest.raises(DeviceError, match="=1: expected fast or strict"):
        runtime.interpreter()


def test_tensor_elsewhere_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(runtime.INTERPRET, raising=False)
    with pytest.raises(KernelError, match="got a tensor on cpu: it runs on a TPU, or on the CPU"):
        rms_norm(torch.ones(2, 4), None, 1e-6)


def test_activation_refuses_torchax_beside_torch_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchax", ModuleType("torchax"))
    with pytest.raises(DeviceError, match="use one of them"):
        runtime.activate()


def test_activation_without_torch_tpu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchax", raising=False)
    _installed(monkeypatch)
    with pytest.raises(DeviceError, match=r"pip install 'polysilicon-tpu\[runtime\]'"):
        runtime.activate()
