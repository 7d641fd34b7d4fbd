"""Latent attention: expanded and absorbed forms against the definition in float64."""

from __future__ import annotations

import copy
import importlib
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from polysilicon.errors import AdaptError
from polysilicon.layers.attention import PagedBatch
from polysilicon.layers.latent_attention import LatentAttention
from polysilicon.layers.linear import Linear
from polysilicon.prepare import prepare
from polysilicon.records import Layout

HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 3, 24, 16, 8, 12, 4


def _layer(dtype: torch.dtype = torch.float32) -> LatentAttention:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=rng) * RANK**-0.5
    projection = Linear(nn.Parameter(weight.to(dtype), requires_grad=False))
    return LatentAttention(projection, HEADS, NOPE, ROPE, VALUE, scale=0.3, name="layers.0")


def _given(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    shapes = ((1, HEADS, tokens, NOPE + ROPE), (1, tokens, RANK), (1, tokens, ROPE))
    q, latent, rotary = (torch.randn(shape, generator=rng).to(dtype) for shape in shapes)
    return q, latent, rotary


def _definition(layer: LatentAttention, q: Tensor, latent: Tensor, rotary: Tensor) -> Tensor:
    """One head and one query at a time, in float64; rounded at the end."""
    dtype = q.dtype
    weight = layer.projection.weight.double().view(HEADS, NOPE + VALUE, RANK)
    q, latent, rotary = (x[0].double() for x in (q, latent, rotary))
    out = torch.zeros(1, q.shape[1], HEADS, VALUE, dtype=torch.float64)
    for head in range(HEADS):
        both = latent @ weight[head].T
        keys, values = torch.cat((both[:, :NOPE], rotary), 1), both[:, NOPE:]
        for i in range(q.shape[1]):
            scores = keys[: i + 1] @ q[head, i] * 0.3
            out[0, i, head] = torch.softmax(scores, 0) @ values[: i + 1]
    return out.to(dtype)


def _batch(
    sequences: list[tuple[int, int, list[int]]],  # new tokens, length with them, blocks
    padding: int = 0,
) -> PagedBatch:
    slots, starts = [], [0]
    tables = torch.zeros(len(sequences), 4, dtype=torch.int32)
    for row, (new, length, blocks) in enumerate(sequences):
        tables[row, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length - new, length)]
        starts.append(len(slots))
    lengths = [length for _, length, _ in sequences]
    return PagedBatch(
        slots=torch.tensor(slots + [-1] * padding),
        block_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32),
        max_query=max(new for new, _, _ in sequences),
        max_kv=max(lengths),
    )


def _paged_layer(layout: Layout | None = None) -> LatentAttention:
    layer = _layer()
    layer.allocate_cache(16, BLOCK, layout=layout)
    assert layer.cache is not None
    layer.cache.fill_(math.nan)  # what was never stored must not be read
    return layer


def _part(given: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> tuple[Tensor, ...]:
    q, latent, rotary = given
    return q[:, :, first:last], latent[:, first:last], rotary[:, first:last]


def test_expanded_form_is_the_definition() -> None:
    layer, given = _layer(), _given(9)
    torch.testing.assert_close(layer(*given), _definition(layer, *given))


@pytest.mark.parametrize("cuts", [(9,), (4, 6, 7, 9), (1, 2, 3, 4, 5, 6, 7, 8, 9)], ids=str)
def test_absorbed_form_is_the_definition_however_it_is_cut(cuts: tuple[int, ...]) -> None:
    layer, given = _paged_layer(), _given(9)
    parts = []
    for first, last in zip((0, *cuts), cuts, strict=False):
        layer.context.batch = _batch([(last - first, last, [5, 2, 11])])
        parts.append(layer(*_part(given, first, last)))
    torch.testing.assert_close(torch.cat(parts, 1), _definition(layer, *given))


def test_sequences_of_one_step_do_not_see_each_other() -> None:
    layer, first, second = _paged_layer(), _given(5), _given(6)
    expected = [_definition(layer, *given) for given in (first, second)]
    layer.context.batch = _batch([(4, 4, [9])])
    layer(*_part(first, 0, 4))
    # One decodes while another is prefilled, and padding follows.
    layer.context.batch = _batch([(1, 5, [9, 1]), (6, 6, [3, 12])], padding=2)
    rows = zip(_part(first, 4, 5), second, _given(2), strict=True)
    out = layer(*(torch.cat(parts, -2) for parts in rows))
    torch.testing.assert_close(out[:, :1], expected[0][:, 4:])
    torch.testing.assert_close(out[:, 1:7], expected[1])
    assert not out[:, 7:].any()


def test_left_padding_hides_keys_in_the_expanded_form() -> None:
    layer, given = _layer(), _given(7)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    mask[..., :3] = False
    expected = _definition(layer, *_part(given, 3, 7))
    torch.testing.assert_close(layer(*given, mask)[:, 3:], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_forms_agree_with_the_definition_in_short_dtypes(dtype: torch.dtype) -> None:
    layer, given = _layer(dtype), _given(9, dtype)
    expected = _definition(layer, *given)
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(layer(*given), expected, rtol=bound, atol=bound)
    layer.allocate_cache(16, BLOCK)
    layer.context.batch = _batch([(9, 9, [5, 2, 11])])
    torch.testing.assert_close(layer(*given), expected, rtol=bound, atol=bound)


def test_a_token_takes_the_latent_and_the_shared_key() -> None:
    layer = _layer()
    assert layer.cache_bytes(1) == (RANK + ROPE) * 4
    layer.allocate_cache(5, BLOCK)
    assert layer.cache is not None
    assert layer.cache.nbytes == 5 * layer.cache_bytes(BLOCK)
    layer.detach_cache()
    assert layer.cache is None


def test_cache_lies_as_its_layout_says() -> None:
    dims = ("heads", "tokens", "blocks", "head_size")
    layer, given = _paged_layer(Layout(name="kv.odd", role="kv_block", dims=dims)), _given(6)
    assert layer.cache is not None
    assert layer.cache.stride() == (RANK + ROPE, 16 * (RANK + ROPE), 1)
    layer.context.batch = _batch([(6, 6, [4, 1])])
    torch.testing.assert_close(layer(*given), _definition(layer, *given))


def test_the_projection_is_listed_once_and_shared() -> None:
    layer = _layer()
    assert not layer.state_dict()
    layer.projection.weight.mul_(2.0)
    given = _given(5)
    torch.testing.assert_close(layer(*given), _definition(layer, *given))


def test_a_copy_has_its_own_projection() -> None:
    model = nn.ModuleDict({"kv_b": (first := _layer()).projection, "attend": first})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin["attend"].projection is twin["kv_b"]
        assert twin["kv_b"] is not model["kv_b"]
        torch.testing.assert_close(twin["attend"](*_given(4)), first(*_given(4)))


@torch.inference_mode()
def test_paged_steps_of_a_prepared_layer_are_one_graph() -> None:
    layer, given = _paged_layer(), _given(8)
    torch._dynamo.reset()
    prepare(nn.Sequential(layer), "cpu")
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=False)
    layer.context.batch = _batch([(8, 8, [6, 1])])
    torch.testing.assert_close(compiled(*given), _definition(layer, *given))


def test_problems_state_every_fact_that_kernels_are_chosen_by() -> None:
    problems = _paged_layer().problems()
    assert dict(problems["latent_attention"].facts) == {
        "heads": HEADS,
        "rank": RANK,
        "rope": ROPE,
        "causal": True,
        "block_size": BLOCK,
    }
    for name, problem in problems.items():
        assert set(problem.facts) <= importlib.import_module(f"polysilicon.ops.{name}").OP.keys


def test_a_projection_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected rank → 84, each head's key"):
        LatentAttention(Linear(torch.zeros(83, RANK)), HEADS, NOPE, ROPE, VALUE, scale=1.0)
    biased = Linear(torch.zeros(84, RANK), torch.zeros(84))
    with pytest.raises(ValueError, match="bias=True"):
        LatentAttention(biased, HEADS, NOPE, ROPE, VALUE, scale=1.0)


def test_a_paged_step_that_does_not_fit_says_what_was_expected() -> None:
    layer = _layer()
    layer.context.batch = _batch([(4, 4, [0])])
    with pytest.raises(AdaptError, match=r"'layers\.0' has no cache"):
        layer(*_given(4))
    layer.allocate_cache(4, BLOCK)
    with pytest.raises(AdaptError, match="paged step of 4 tokens: expected batch 1"):
        layer(*_given(3))
    with pytest.raises(ValueError, match=r"expected \[blocks, block_size, 32\]"):
        layer.attach_cache(torch.zeros(4, BLOCK, 31))
