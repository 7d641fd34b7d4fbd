from __future__ import annotations

import pytest
import torch

from polysilicon.ops import kv_store
from polysilicon.ops.contract import Sample

CASES = [
    pytest.param(sample, id=f"{str(dtype)[6:]}-{sample.name}")
    for dtype in kv_store.OP.dtypes
    for sample in kv_store.OP.samples(dtype, torch.device("cpu"))
]


def _stored(kernel: object, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    # clone() keeps the strides, and with them the layout that the sample is about.
    caches = {name: sample.kwargs[name].clone() for name in kv_store.OP.mutates}
    kernel(**{**sample.kwargs, **caches})  # type: ignore[operator]
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
