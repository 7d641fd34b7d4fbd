"""Chunked equals step by step, wherever the state is handed over, and nobody else's state moves."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.errors import AdaptError
from polysilicon.layers import (
    CausalConv1d,
    GatedDeltaRule,
    PagedBatch,
    SelectiveScan,
    StateSpace,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from polysilicon.layers.recurrent import Recurrent

    Call = Callable[[Recurrent, slice, Tensor | None], tuple[Tensor, Tensor]]

LENGTHS = (1, 63, 64, 65, 257)
BATCH = 2


def _conv(length: int) -> tuple[Any, Any]:
    x, weight, bias = torch.randn(BATCH, length, 6), torch.randn(6, 4), torch.randn(6)
    layer = CausalConv1d(6, 4, activation="silu", bias=True)
    return layer, lambda own, part, state: own(x[:, part], weight, bias, state)


def _ssd(length: int) -> tuple[Any, Any]:
    x, dt = torch.randn(BATCH, length, 4, 5), torch.randn(BATCH, length, 4)
    a, d, bias = -torch.rand(4), torch.randn(4), torch.randn(4)
    b, c = torch.randn(BATCH, length, 2, 8) / 4, torch.randn(BATCH, length, 2, 8)
    layer = StateSpace(4, 5, 2, 8)

    def call(own: Any, part: slice, state: Tensor | None) -> Any:
        return own(x[:, part], dt[:, part], a, b[:, part], c[:, part], d, bias, state)

    return layer, call


def _scan(length: int) -> tuple[Any, Any]:
    x, dt = torch.randn(2, BATCH, length, 6)
    a, d, bias = -torch.rand(6, 8), torch.randn(6), torch.randn(6)
    b, c = torch.randn(2, BATCH, length, 8) / 2
    layer = SelectiveScan(6, 8)

    def call(own: Any, part: slice, state: Tensor | None) -> Any:
        return own(x[:, part], dt[:, part], a, b[:, part], c[:, part], d, bias, state)

    return layer, call


def _delta(length: int, *, by_channel: bool = False) -> tuple[Any, Any]:
    q, k = torch.randn(2, BATCH, length, 2, 8)
    v = torch.randn(BATCH, length, 4, 5)
    g = -torch.rand(BATCH, length, 4, *([8] if by_channel else []))
    beta = torch.rand(BATCH, length, 4)
    layer = GatedDeltaRule(2, 4, 8, 5, scale=8**-0.5, by_channel=by_channel)

    def call(own: Any, part: slice, state: Tensor | None) -> Any:
        rows = (x[:, part] for x in (q, k, v, g, beta))
        return own(*rows, state)

    return layer, call


OPS = {
    "causal_conv1d": _conv,
    "ssd": _ssd,
    "selective_scan": _scan,
    "gated_delta_rule": _delta,
    "gated_delta_rule by channel": partial(_delta, by_channel=True),
}


def _pieces(layer: Any, call: Any, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """The sequence in pieces, the state handed from each to the next."""
    state, ys = None, []
    for start, end in itertools.pairwise(cuts):
        y, state = call(layer, slice(start, end), state)
        ys.append(y)
    assert state is not None
    return torch.cat(ys, 1), state


def _assert_same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_chunked_equals_step_by_step(op: str, length: int) -> None:
    torch.manual_seed(length)
    layer, call = OPS[op](length)
    _assert_same(call(layer, slice(None), None), _pieces(layer, call, list(range(length + 1))))


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 129), seed=st.integers(0, 2**16))
def test_the_state_may_be_handed_over_at_any_point(op: str, cut: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer, call = OPS[op](130)
    _assert_same(_pieces(layer, call, [0, cut, 130]), call(layer, slice(None), None))


@pytest.mark.parametrize("op", OPS)
def test_the_callers_state_keeps_its_bits(op: str) -> None:
    torch.manual_seed(0)
    layer, call = OPS[op](9)
    _, state = call(layer, slice(0, 5), None)
    before = state.clone()
    call(layer, slice(5, 9), state)
    assert torch.equal(state, before)


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_equal_those_alone(op: str) -> None:
    """A prefill and a decode step in one row, with the states in an engine's rows."""
    torch.manual_seed(1)
    layer, call = OPS[op](12)
    first, _ = call(layer, slice(0, 11), None)
    states = torch.full((4, *layer.state_shape()), torch.nan)
    _, states[2] = (x[0] for x in call(layer, slice(0, 11), None))
    layer.attach_state(states)
    for slot, start, end in ((1, 0, 11), (2, 11, 12)):
        layer.context.batch = PagedBatch(
            slots=torch.arange(end - start),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            kv_lengths=torch.tensor([end], dtype=torch.int32),
            max_query=end - start,
            max_kv=end,
            state_slots=torch.tensor([slot], dtype=torch.int32),
        )
        got, _ = _alone(call, layer, slice(start, end))
        wanted = first[:1] if start == 0 else None
        layer.context.batch = None
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    layer.detach_state()
    whole, final = call(layer, slice(None), None)
    torch.testing.assert_close(got, whole[:1, 11:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[2], final[0], rtol=1e-4, atol=1e-4)
    assert states[0].isnan().all()
    assert states[3].isnan().all()


def _alone(call: Any, layer: Any, part: slice) -> tuple[Tensor, Tensor]:
    """The first sequence of the batch only, as the engine's one row."""

    def first(*arguments: Any) -> Any:
        *rows, state = arguments
        cut = [
            x[:1] if isinstance(x, torch.Tensor) and x.shape[:1] == (BATCH,) and x.dim() > 2 else x
            for x in rows
        ]
        return layer(*cut, state)

    return call(first, part, None)


@pytest.mark.parametrize("op", OPS)
def test_a_paged_step_without_states_is_refused(op: str) -> None:
    layer, call = OPS[op](1)
    layer.context.batch = PagedBatch(
        slots=torch.arange(2),
        block_tables=torch.zeros(2, 1, dtype=torch.int32),
        query_starts=torch.tensor([0, 1, 2], dtype=torch.int32),
        kv_lengths=torch.tensor([1, 1], dtype=torch.int32),
        max_query=1,
        max_kv=1,
    )
    with pytest.raises(AdaptError, match="has no states: call attach_state"):
        call(layer, slice(None), None)
