"""What is compiled offline is, byte for byte, what a launch on the chip compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="needs Triton: python -m nox -s offline")

import torch
import triton

from polysilicon.api import compile_triton

from . import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to launch on")
BLOCKS = {"BM": 64, "BN": 64, "BK": 32}


def _multiply(device: str, rows: int, columns: int, offset: int, transposed: bool) -> None:
    a = torch.zeros(300, rows, dtype=torch.bfloat16, device=device)
    flat = torch.zeros(rows * columns + offset, dtype=torch.bfloat16, device=device)[offset:]
    b = flat.view(columns, rows).t() if transposed else flat.view(rows, columns)
    kernels.multiply(a, b, **BLOCKS)


@pytest.mark.parametrize(
    "shape",
    # As they come, strided the other way, not aligned to 16 bytes, divisible by nothing.
    [(512, 256, 0, False), (512, 256, 0, True), (512, 256, 1, False), (511, 255, 0, False)],
)
def test_binary_equals_that_of_a_launch(
    shape: tuple[int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = triton.runtime.driver.active.get_current_target()
    where = {"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size}
    (offline,) = compile_triton(lambda: _multiply("meta", *shape), **where)
    launched = []
    run: Callable[..., object] = triton.runtime.jit.JITFunction.run

    def spy(self: object, *arguments: object, **options: object) -> object:
        launched.append(run(self, *arguments, **options))
        return launched[-1]

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", spy)
    _multiply("cuda", *shape)
    assert [stage for stage, code in launched[0].asm.items() if offline.asm[stage] != code] == []
