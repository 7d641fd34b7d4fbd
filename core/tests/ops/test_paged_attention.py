from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from polysilicon.ops import attention, paged_attention
from polysilicon.ops.paged_plan import CHUNK
from polysilicon.ops.paged_samples import paged_call

if TYPE_CHECKING:
    from polysilicon.ops.contract import Sample

CPU = torch.device("cpu")
CASES = [
    pytest.param(dtype, sample, id=f"{str(dtype)[6:]}-{sample.name}")
    for dtype in paged_attention.OP.dtypes
    for sample in paged_attention.OP.samples(dtype, CPU)
]


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


def _decode(tables: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Each sequence decodes one token; all slots of block n hold the number n."""
    blocks = torch.arange(8.0)[:, None, None, None].expand(8, 4, 2, 16).contiguous()
    return {
        "q": torch.zeros(len(tables), 4, 16),
        "k_cache": blocks,
        "v_cache": blocks.clone(),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
        "query_starts": torch.arange(len(tables) + 1, dtype=torch.int32),
        "kv_lengths": torch.tensor(lengths, dtype=torch.int32),
        "scale": 1.0,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "causal": True,
        "max_query": 1,
        "max_kv": 8,
    }


def test_metadata_changed_in_place_is_noticed() -> None:
    kwargs = _decode([[5, 0]], [4])
    with torch.inference_mode():
        first, _ = paged_attention.torch_kernel(**kwargs)
        kwargs["block_tables"][0, 0] = 3
        second, _ = paged_attention.torch_kernel(**kwargs)
        kwargs["kv_lengths"][0] = 8
        third, _ = paged_attention.torch_kernel(**kwargs)
    assert [float(out.mean()) for out in (first, second, third)] == [5.0, 3.0, 1.5]


@pytest.mark.parametrize(("context", "window"), [(0, 0), (0, 100), (300, 0), (300, 100)], ids=str)
def test_long_prompts_are_the_same_in_chunks(context: int, window: int) -> None:
    # More queries than one masked chunk holds, and no multiple of it.
    length = 2 * CHUNK + 77 + context
    call = paged_call(
        "long", [(length - context, length)], torch.float32, CPU, window=window, block_size=16
    )
    q, cache = call.kwargs["q"], [call.kwargs[name] for name in ("k_cache", "v_cache")]
    own = call.kwargs["block_tables"][0].long()
    k, v = (c[own].flatten(0, 1)[:length].transpose(0, 1)[None] for c in cache)
    expected, expected_lse = attention.torch_kernel(
        q.transpose(0, 1)[None], k, v, None, call.kwargs["scale"], True, window, 0.0, None
    )
    out, lse = paged_attention.torch_kernel(**call.kwargs)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected_lse[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_starts": torch.tensor([0, 2])}, "does not fit 1 tokens of 1 sequences"),
        ({"query_starts": torch.tensor([1, 1])}, "expected 0, then the end of each"),
        ({"kv_lengths": torch.tensor([9])}, "the table must hold a block for each token"),
        ({"kv_lengths": torch.tensor([0])}, "kv_lengths counts the new tokens too"),
        ({"block_tables": torch.tensor([[8, 0]])}, "of a cache that has 8: each must lie in it"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    kwargs = _decode([[5, 0]], [8])
    kwargs |= {name: value.int() for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        paged_attention.torch_kernel(**kwargs)
