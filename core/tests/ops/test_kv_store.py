from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from polysilicon.ops import kv_store
from polysilicon.ops.contract import Sample
from polysilicon.ops.verify import mismatch
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = [
    pytest.param(sample, id=f"{str(dtype)[6:]}-{sample.name}")
    for dtype in kv_store.OP.dtypes
    for sample in kv_store.OP.samples(dtype, torch.device("cpu"))
]


def _stored(kernel: Callable[..., None], sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    # clone() keeps the strides, and with them the layout that the sample is about.
    caches = {name: sample.kwargs[name].clone() for name in kv_store.OP.mutates}
    kernel(**{**sample.kwargs, **caches})
    return caches["k_cache"], caches["v_cache"]


@pytest.mark.parametrize("sample", CASES)
def test_kernel_stores_what_the_reference_stores_to_the_bit(sample: Sample) -> None:
    expected, stored = _stored(kv_store.reference, sample), _stored(kv_store.torch_kernel, sample)
    torch.testing.assert_close(stored, expected, rtol=0, atol=0)


def test_a_step_of_padding_leaves_the_cache_untouched() -> None:
    sample = next(
        s
        for s in kv_store.OP.samples(torch.float32, torch.device("cpu"))
        if s.name == "only_padding"
    )
    stored = _stored(kv_store.torch_kernel, sample)
    assert torch.equal(stored[0], sample.kwargs["k_cache"])
    assert torch.equal(stored[1], sample.kwargs["v_cache"])


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_call_of_a_problem_has_its_shapes_and_agrees(tokens: int) -> None:
    facts = {"kv_heads": 3, "head_size": 64, "v_head_size": 32, "block_size": 8}
    problem = Problem(op="kv_store", dtype="float32", facts=facts)
    assert kv_store.OP.inputs is not None
    kwargs = kv_store.OP.inputs(problem, tokens, torch.float32, torch.device("cpu"))
    assert kv_store.OP.tokens(kwargs["k"]) == tokens
    assert kwargs["v_cache"].shape[1:] == (8, 3, 32)
    sample = Sample(name="problem", kwargs=kwargs)
    assert mismatch(kv_store.OP, kv_store.torch_kernel, sample, torch.float32) is None
