from __future__ import annotations

import pytest
import torch

from polysilicon.ops import paged_attention
from polysilicon.ops.contract import Sample, tolerance
from polysilicon.ops.verify import mismatch
from polysilicon.records import Problem

CPU = torch.device("cpu")
CASES = [
    pytest.param(dtype, sample, id=f"{str(dtype)[6:]}-{sample.name}")
    for dtype in paged_attention.OP.dtypes
    for sample in paged_attention.OP.samples(dtype, CPU)
]


@pytest.mark.parametrize(("dtype", "sample"), CASES)
def test_kernel_agrees_with_the_reference(dtype: torch.dtype, sample: Sample) -> None:
    expected, expected_lse = paged_attention.reference(**sample.kwargs)
    out, lse = paged_attention.torch_kernel(**sample.kwargs)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    reduction = paged_attention.OP.reduction(sample.kwargs)
    rtol, atol = tolerance(dtype, reduction)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    # The fused CPU kernel's exponential for half types is good to 6e-5 (measured).
    rtol, atol = tolerance(torch.float32, reduction) if dtype == torch.float32 else (1e-4, 1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=rtol, atol=atol)


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_call_of_a_problem_has_its_shapes_and_agrees(tokens: int) -> None:
    problem = Problem(
        op="paged_attention",
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
    assert paged_attention.OP.inputs is not None
    kwargs = paged_attention.OP.inputs(problem, tokens, torch.float32, CPU)
    assert paged_attention.OP.tokens(kwargs["q"]) == tokens
    sample = Sample(name="problem", kwargs=kwargs)
    assert mismatch(paged_attention.OP, paged_attention.torch_kernel, sample, torch.float32) is None


@pytest.mark.parametrize(("dtype", "sample"), CASES)
def test_results_lie_as_the_shape_function_says(dtype: torch.dtype, sample: Sample) -> None:
    # Compiled graphs assert the strides that the shape function promised.
    promised = paged_attention.paged_attention_fake(**sample.kwargs)
    for result, promise in zip(
        paged_attention.torch_kernel(**sample.kwargs), promised, strict=True
    ):
        assert result.dtype == promise.dtype
        assert result.shape == promise.shape
        assert result.stride() == promise.stride()
