from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from polysilicon.ops import attention, latent_attention, latent_store
from polysilicon.ops.contract import Sample
from polysilicon.ops.latent_attention import latent_call
from polysilicon.ops.paged_plan import CHUNK
from polysilicon.ops.verify import mismatch
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


def _cases(module: object) -> list[object]:
    op = module.OP  # type: ignore[attr-defined]
    return [
        pytest.param(dtype, sample, id=f"{str(dtype)[6:]}-{sample.name}")
        for dtype in op.dtypes
        for sample in op.samples(dtype, CPU)
    ]


@pytest.mark.parametrize(("dtype", "sample"), _cases(latent_attention))
def test_kernel_agrees_with_the_reference(dtype: torch.dtype, sample: Sample) -> None:
    assert mismatch(latent_attention.OP, latent_attention.torch_kernel, sample, dtype) is None


@pytest.mark.parametrize(("dtype", "sample"), _cases(latent_attention))
def test_results_lie_as_the_shape_function_says(dtype: torch.dtype, sample: Sample) -> None:
    # Compiled graphs assert the strides that the shape function promised.
    promised = latent_attention.latent_attention_fake(**sample.kwargs)
    for result, promise in zip(
        latent_attention.torch_kernel(**sample.kwargs), promised, strict=True
    ):
        assert result.dtype == promise.dtype
        assert result.shape == promise.shape
        assert result.stride() == promise.stride()


@pytest.mark.parametrize("context", [0, 300])
def test_long_prompts_are_the_same_in_chunks(context: int) -> None:
    # More queries than one masked chunk holds, and no multiple of it.
    length = CHUNK + 77 + context
    call = latent_call("long", [(length - context, length)], torch.float32, CPU, block_size=16)
    own = call.kwargs["block_tables"][0].long()
    keys = call.kwargs["cache"][own].flatten(0, 1)[:length][None, None]
    rank, scale, q = (call.kwargs[name] for name in ("rank", "scale", "q"))
    expected, expected_lse = attention.torch_kernel(
        q.transpose(0, 1)[None], keys, keys[..., :rank], None, scale, True, 0, 0.0, None
    )
    out, lse = latent_attention.torch_kernel(**call.kwargs)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected_lse[0])


def _stored(kernel: Callable[..., None], sample: Sample) -> torch.Tensor:
    # clone() keeps the strides, and with them the layout that the sample is about.
    cache: torch.Tensor = sample.kwargs["cache"].clone()
    kernel(**{**sample.kwargs, "cache": cache})
    return cache


@pytest.mark.parametrize(("dtype", "sample"), _cases(latent_store))
def test_kernel_stores_what_the_reference_stores_to_the_bit(
    dtype: torch.dtype, sample: Sample
) -> None:
    expected = _stored(latent_store.reference, sample)
    stored = _stored(latent_store.torch_kernel, sample)
    assert stored.dtype == dtype
    torch.testing.assert_close(stored, expected, rtol=0, atol=0)


def test_a_step_of_padding_leaves_the_cache_untouched() -> None:
    samples = latent_store.OP.samples(torch.float32, CPU)
    sample = next(one for one in samples if one.name == "only_padding")
    assert torch.equal(_stored(latent_store.torch_kernel, sample), sample.kwargs["cache"])


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_call_of_a_problem_has_its_shapes_and_agrees(tokens: int) -> None:
    facts = {"rank": 48, "rope": 16, "block_size": 8}
    for op, more in ((latent_store, {}), (latent_attention, {"heads": 3, "causal": True})):
        problem = Problem(op=op.OP.name, dtype="float32", facts=facts | more)
        assert op.OP.inputs is not None
        kwargs = op.OP.inputs(problem, tokens, torch.float32, CPU)
        assert op.OP.tokens(next(iter(kwargs.values()))) == tokens
        assert kwargs["cache"].shape[1:] == (8, 64)
        sample = Sample(name="problem", kwargs=kwargs)
        assert mismatch(op.OP, op.torch_kernel, sample, torch.float32) is None
