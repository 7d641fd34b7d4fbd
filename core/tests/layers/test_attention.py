from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from polysilicon.errors import AdaptError
from polysilicon.layers.attention import (
    Attention,
    PagedBatch,
    PagedContext,
    allocate_kv_cache,
)
from polysilicon.prepare import prepare
from polysilicon.records import Layout

if TYPE_CHECKING:
    from torch import Tensor

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 4


def _layer(**options: Any) -> Attention:
    layer = Attention(HEADS, KV_HEADS, SIZE, **{"scale": 0.25, "name": "layers.0", **options})
    layer.attach_cache(*allocate_kv_cache(16, BLOCK, KV_HEADS, SIZE))
    return layer


def _qkv(tokens: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    shapes = ((HEADS, tokens), (KV_HEADS, tokens), (KV_HEADS, tokens))
    q, k, v = (torch.randn(batch, *shape, SIZE, generator=rng) for shape in shapes)
    return q, k, v


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


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": True}])
def test_paged_chunks_and_decode_give_the_dense_rows(options: dict[str, Any]) -> None:
    if "sinks" in options:
        options = {"sinks": torch.linspace(-1, 1, HEADS)}
    layer = _layer(**options)
    q, k, v = _qkv(7)
    dense = layer(q, k, v)
    parts = []
    for first, last in ((0, 4), (4, 6), (6, 7)):
        layer.context.batch = _batch([(last - first, last, [5, 2])])
        parts.append(layer(*(x[:, :, first:last] for x in (q, k, v))))
    torch.testing.assert_close(torch.cat(parts, 1), dense)


def test_sequences_of_one_step_do_not_see_each_other() -> None:
    layer = _layer()
    first, second = _qkv(5), _qkv(6)
    expected = torch.cat((layer(*first), layer(*second)), 1)
    layer.context.batch = _batch([(5, 5, [9, 1]), (6, 6, [3, 12])], padding=2)
    both = (
        torch.cat((a, b, torch.full_like(a[:, :, :2], 7.0)), 2)
        for a, b in zip(first, second, strict=True)
    )
    out = layer(*both)
    torch.testing.assert_close(out[:, :11], expected)
    assert not out[:, 11:].any()


def test_prefix_blocks_shared_by_two_sequences_serve_both() -> None:
    layer = _layer()
    q, k, v = _qkv(6)
    dense = layer(q, k, v)
    layer.context.batch = _batch([(4, 4, [7])])
    layer(*(x[:, :, :4] for x in (q, k, v)))
    layer.context.batch = _batch([(2, 6, [7, 2]), (2, 6, [7, 11])])
    out = layer(*(torch.cat((x[:, :, 4:], x[:, :, 4:]), 2) for x in (q, k, v)))
    torch.testing.assert_close(out, torch.cat((dense[:, 4:], dense[:, 4:]), 1))


# Transformers itself as the oracle: both of its attention functions, with its own masks.
def _hf_module() -> Any:
    module: Any = nn.Module()
    module.config = LlamaConfig(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    module.num_key_value_groups = HEADS // KV_HEADS
    module.is_causal = True
    module.training = False
    return module


def _left_padding(tokens: int) -> Tensor:  # bool [2, 1, tokens, tokens]
    mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril()
    mask[1, :, :, :3] = False
    return mask


def test_left_padding_gives_transformers_rows_and_no_nan() -> None:
    q, k, v = _qkv(7, batch=2)
    mask = _left_padding(7)
    lowest = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    by_bool, _ = sdpa_attention_forward(_hf_module(), q, k, v, mask, scaling=0.25)
    by_float, _ = eager_attention_forward(_hf_module(), q, k, v, lowest, scaling=0.25)
    layer = _layer()
    out = layer(q, k, v, mask)
    assert not out.isnan().any()
    torch.testing.assert_close(out[0], by_bool[0])
    torch.testing.assert_close(out[1, 3:], by_bool[1, 3:])
    torch.testing.assert_close(layer(q, k, v, lowest), by_float)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 9)], ids=["prefill", "decode"])
def test_no_mask_means_what_it_means_to_transformers(queries: int, keys: int) -> None:
    q, k, v = _qkv(keys)
    q = q[:, :, -queries:]
    expected, _ = sdpa_attention_forward(_hf_module(), q, k, v, None, scaling=0.25)
    torch.testing.assert_close(_layer()(q, k, v), expected)


class _Stack(nn.Module):
    """Two attention layers behind one projection, as a model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.context = PagedContext()
        self.project = nn.Linear(HEADS * SIZE, (HEADS + 2 * KV_HEADS) * SIZE)
        self.layers = nn.ModuleList(_layer(context=self.context, window=w) for w in (0, 5))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        for layer in self.layers:
            heads = self.project(x).view(batch, tokens, -1, SIZE).transpose(1, 2)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            x = x + layer(q, k, v).flatten(2)
        return x


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@torch.inference_mode()
def test_steps_of_one_shape_share_one_graph(backend: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    stack = _Stack()
    prepare(stack, "cpu")
    compiled = torch.compile(stack, fullgraph=True, backend=backend, dynamic=False)
    x = torch.randn(1, 12, HEADS * SIZE)
    dense = stack(x)
    steps = [
        (0, 4, _batch([(4, 4, [6])])),
        (4, 8, _batch([(4, 8, [6, 1])])),
        (8, 12, _batch([(4, 12, [6, 1, 2])])),
    ]
    parts = []
    for first, last, step in steps:
        stack.context.batch = step
        parts.append(compiled(x[:, first:last]))
    torch.testing.assert_close(torch.cat(parts, 1), dense)
    assert counters["stats"]["unique_graphs"] == 1


@torch.inference_mode()
def test_dense_and_paged_calls_of_one_compiled_model_are_kept_apart() -> None:
    torch._dynamo.reset()
    stack = _Stack()
    prepare(stack, "cpu")
    compiled = torch.compile(stack, fullgraph=True, backend="eager", dynamic=False)
    x = torch.randn(1, 4, HEADS * SIZE)
    expected = stack(x)
    torch.testing.assert_close(compiled(x), expected)
    stack.context.batch = _batch([(4, 4, [3])])
    torch.testing.assert_close(compiled(x), expected)
    stack.context.batch = None
    torch.testing.assert_close(compiled(x), expected)


def test_problem_states_every_fact_that_kernels_are_chosen_by() -> None:
    layer = _layer(window=8, softcap=3.0, sinks=torch.zeros(HEADS))
    problems = layer.problems()
    assert dict(problems["paged_attention"].facts) == {
        "heads": 4,
        "kv_heads": 2,
        "head_size": 16,
        "v_head_size": 16,
        "window": 8,
        "softcap": True,
        "sinks": True,
        "causal": True,
        "block_size": 4,
    }
    for name, problem in problems.items():
        op = importlib.import_module(f"polysilicon.ops.{name}").OP
        assert set(problem.facts) <= op.keys


def test_paged_step_without_a_cache_names_the_layer() -> None:
    layer = _layer()
    layer.detach_cache()
    layer.context.batch = _batch([(4, 4, [0])])
    with pytest.raises(AdaptError, match=r"'layers\.0' has no cache"):
        layer(*_qkv(4))


@pytest.mark.parametrize(("batch", "tokens"), [(2, 4), (1, 3)])
def test_paged_step_of_another_shape_says_what_was_expected(batch: int, tokens: int) -> None:
    layer = _layer()
    layer.context.batch = _batch([(4, 4, [0])])
    with pytest.raises(AdaptError, match="paged step of 4 tokens: expected batch 1"):
        layer(*_qkv(tokens, batch))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="9 query heads and 2 key heads"):
        Attention(9, 2, 16, scale=1.0)


def test_sinks_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sinks of shape \(3,\)"):
        Attention(4, 2, 16, scale=1.0, sinks=torch.zeros(3))


def test_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window -1"):
        Attention(4, 2, 16, scale=1.0, window=-1)


def test_cache_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[blocks, block_size, 2, 16\]"):
        _layer().attach_cache(*allocate_kv_cache(4, 4, 2, 32))


def test_batch_of_unequal_parts_is_refused() -> None:
    good = _batch([(4, 4, [0])])
    with pytest.raises(ValueError, match="needs 2 query_starts and 1 kv_lengths"):
        PagedBatch(
            slots=good.slots,
            block_tables=good.block_tables,
            query_starts=good.query_starts[:1],
            kv_lengths=good.kv_lengths,
            max_query=4,
            max_kv=4,
        )


def test_sinks_and_caches_are_not_saved_with_the_layer() -> None:
    assert not _layer(sinks=nn.Parameter(torch.zeros(HEADS))).state_dict()


def test_cache_lies_as_its_layout_says() -> None:
    layout = Layout(
        name="kv.heads_first", role="kv_block", dims=("heads", "blocks", "tokens", "head_size")
    )
    k_cache, v_cache = allocate_kv_cache(5, 4, 2, 16, 8, layout=layout)
    assert k_cache.shape == (5, 4, 2, 16)
    assert v_cache.shape == (5, 4, 2, 8)
    assert k_cache.stride() == (64, 16, 5 * 64, 1)
    layer = Attention(HEADS, KV_HEADS, SIZE, 8, scale=0.25)
    q, k, v = _qkv(6)
    expected = layer(q, k, v[..., :8])
    layer.attach_cache(k_cache, v_cache)
    layer.context.batch = _batch([(6, 6, [4, 1])])
    torch.testing.assert_close(layer(q, k, v[..., :8]), expected)


def test_layout_of_other_dims_is_refused() -> None:
    layout = Layout(name="kv.odd", role="kv_block", dims=("blocks", "tokens"))
    with pytest.raises(ValueError, match=r"'kv\.odd' has dims"):
        allocate_kv_cache(1, 1, 1, 1, layout=layout)


def test_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        allocate_kv_cache(0, 4, 2, 16)


def test_a_layer_that_shares_stores_nothing_and_reads_its_owners_cache() -> None:
    owner, reader = _layer(), Attention(HEADS, KV_HEADS, SIZE, scale=0.25)
    reader.share_cache(owner)
    for layer in (owner, reader):
        layer.allocate_cache(16, BLOCK)
    assert reader.k_cache is None
    assert owner.cache_bytes(BLOCK) == BLOCK * KV_HEADS * 2 * SIZE * 4
    assert reader.cache_bytes(BLOCK) == 0
    twin = copy.deepcopy(torch.nn.ModuleList([owner, reader]))
    assert twin[1].cache_owner is twin[0]


def test_layers_of_other_sizes_share_no_cache() -> None:
    wide = Attention(4, 2, 64, scale=1.0, name="wide")
    narrow = Attention(4, 2, 32, scale=1.0, name="narrow")
    with pytest.raises(ValueError, match=r"'narrow' has key heads and sizes \(2, 32, 32\).*'wide'"):
        narrow.share_cache(wide)
