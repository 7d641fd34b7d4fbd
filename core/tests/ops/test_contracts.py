"""Every op's contract holds together; test_conformance.py holds the kernels to it."""

from __future__ import annotations

import inspect

import pytest
import torch

from polysilicon import ops
from polysilicon.calling import load_target
from polysilicon.defaults import KERNELS
from polysilicon.ops.verify import mismatch, same_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ops.NAMES)
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


@pytest.mark.parametrize("name", ops.NAMES)
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
