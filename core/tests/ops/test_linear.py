"""linear on a CPU: the kernels for few tokens are chosen, and every kernel compiles whole."""

from __future__ import annotations

import pytest
import torch

from polysilicon.calling import load_kernel
from polysilicon.defaults import KERNELS

LINEAR = {kernel.name: kernel for kernel in KERNELS if kernel.op == "linear"}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("out", [64, 33])
def test_kernel_compiles_without_a_break(name: str, tokens: int, out: int) -> None:
    kernel = load_kernel(LINEAR[name])
    torch.compiler.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    x, weight, bias = torch.randn(1, tokens, 48), torch.randn(out, 48), torch.randn(out)
    torch.testing.assert_close(compiled(x, weight, bias), kernel(x, weight, bias))


def test_onednn_compiles_with_inductor() -> None:
    kernel = load_kernel(LINEAR["linear.onednn"])
    compiled = torch.compile(kernel, fullgraph=True)
    x, weight = torch.randn(9, 48), torch.randn(64, 48)
    torch.testing.assert_close(compiled(x, weight, None), kernel(x, weight, None))
