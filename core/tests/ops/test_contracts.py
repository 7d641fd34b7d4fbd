"""Every op's portable kernels keep its contract; later ops are tested without a change."""

from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING

import pytest
import torch

from polysilicon import ops
from polysilicon.calling import load_kernel, load_target
from polysilicon.defaults import KERNELS as ALL_KERNELS
from polysilicon.ops.verify import as_results, copied, mismatch, same_bits

if TYPE_CHECKING:
    from polysilicon.records import Kernel

CPU = torch.device("cpu")
#: Ops of this release whose module exists.
NAMES = [n for n in ops.NAMES if importlib.util.find_spec(f"polysilicon.ops.{n}")]
KERNELS = [kernel for kernel in ALL_KERNELS if kernel.op in NAMES]
CASES = [
    pytest.param(kernel, dtype, id=f"{kernel.name}-{str(dtype)[6:]}")
    for kernel in KERNELS
    for dtype in ops.get(kernel.op).dtypes
    if not kernel.dtypes or str(dtype)[6:] in kernel.dtypes
]


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_kernel_agrees_with_the_reference(kernel: Kernel, dtype: torch.dtype) -> None:
    op, call = ops.get(kernel.op), load_kernel(kernel)
    found = {s.name: mismatch(op, call, s, dtype) for s in op.samples(dtype, CPU)}
    assert found, "the op has no samples"
    assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_kernel_gives_the_same_bits_twice(kernel: Kernel, dtype: torch.dtype) -> None:
    op, call = ops.get(kernel.op), load_kernel(kernel)
    for sample in op.samples(dtype, CPU):
        first, second = (as_results(call(**copied(sample.kwargs))) for _ in range(2))
        assert all(map(same_bits, first, second)), sample.name


@pytest.mark.parametrize("name", NAMES)
def test_schema_parses_and_names_the_kernels_arguments(name: str) -> None:
    op = ops.get(name)
    schema = torch._C.parse_schema(name + op.schema)
    named = [argument.name for argument in schema.arguments]
    for kernel in (op.reference, *(load_target(k.target) for k in KERNELS if k.op == name)):
        assert list(inspect.signature(kernel).parameters) == named
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == set(op.mutates)
    assert op.keys
    assert op.source


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_the_same_each_time(name: str) -> None:
    op = ops.get(name)
    pairs = zip(op.samples(torch.float32, CPU), op.samples(torch.float32, CPU), strict=True)
    for first, second in pairs:
        assert first.name == second.name
        for key, value in first.kwargs.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(value, second.kwargs[key])


def test_a_wrong_kernel_is_found() -> None:
    op = ops.get("silu_and_mul")
    sample = next(s for s in op.samples(torch.float32, CPU) if s.name == "tokens 7")
    gate, up = sample.kwargs["x"].chunk(2, dim=-1)
    wrong = {
        "values": lambda x: torch.nn.functional.silu(gate) * up * 1.00001,
        "dtype": lambda x: op.reference(x),
        "shape": lambda x: op.reference(x).float()[:-1],
        "contiguous": lambda x: op.reference(x).float().t().contiguous().t(),
        "changed": lambda x: op.reference(x.add_(0.5).sub(0.5)).float(),
    }
    texts = {name: mismatch(op, kernel, sample, torch.float32) for name, kernel in wrong.items()}
    assert "got " in str(texts.pop("values"))
    assert all(name in str(text) for name, text in texts.items()), texts
