"""What the dense and the paged attention op have in common: two results, and both are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polysilicon.ops import attention, paged_attention
from polysilicon.ops.contract import Sample, tolerance
from polysilicon.ops.verify import mismatch
from polysilicon.records import Problem

CPU = torch.device("cpu")
OPS = (attention, paged_attention)
NAMES = tuple(op.OP.name for op in OPS)
CASES = [
    pytest.param(op, dtype, sample, id=f"{op.OP.name}-{str(dtype)[6:]}-{sample.name}")
    for op in OPS
    for dtype in op.OP.dtypes
    for sample in op.OP.samples(dtype, CPU)
]


@pytest.mark.parametrize(("op", "dtype", "sample"), CASES)
def test_kernel_agrees_with_the_reference(op: Any, dtype: torch.dtype, sample: Sample) -> None:
    expected, expected_lse = op.reference(**sample.kwargs)
    out, lse = op.torch_kernel(**sample.kwargs)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    reduction = op.OP.reduction(sample.kwargs)
    rtol, atol = tolerance(dtype, reduction)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    # The fused CPU kernel's exponential for half types is good to 6e-5 (measured).
    rtol, atol = tolerance(torch.float32, reduction) if dtype == torch.float32 else (1e-4, 1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=rtol, atol=atol)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_call_of_a_problem_has_its_shapes_and_agrees(op: Any, tokens: int) -> None:
    problem = Problem(
        op=op.OP.name,
        dtype="float32",
        facts={
            "heads": 9,
            "kv_heads": 3,
            "head_size": 64,
            "v_head_size": 64,
            "window": 33,
            "softcap": False,
            "sinks": True,
        },
    )
    assert op.OP.inputs is not None
    kwargs = op.OP.inputs(problem, tokens, torch.float32, CPU)
    assert op.OP.tokens(kwargs["q"]) == tokens
    sample = Sample(name="problem", kwargs=kwargs)
    assert mismatch(op.OP, op.torch_kernel, sample, torch.float32) is None
