"""Routers and experts of unusual forms: replaced, equal, compiled in one graph, and undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polysilicon
from polysilicon.adapt import tiny
from polysilicon.adapt.coverage_probes import forward_logits, token_ids
from polysilicon.adapt.dense_experts import EqualShares, ScoresLike
from polysilicon.layers import Experts, Router
from polysilicon.ops import experts

#: Experts that give the token back; scores of the chosen only, with a correction of the logits;
#: experts that all tokens run through, scaled by scores that are zero for those not chosen;
#: a router whose correction lies in a child.
MODELS = ("longcat_flash", "kolibri1", "llama4_text", "ernie4_5_moe")


def build(name: str) -> Any:
    return tiny.tiny_model(tiny.tiny_config(name), dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_replaced_and_the_logits_stay(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        before = forward_logits(model, input_ids=token_ids(model, 3))
        keys = set(model.state_dict())
        adapted = polysilicon.adapt(model)
        after = forward_logits(model, input_ids=token_ids(model, 3))
    assert not adapted.report.kept
    assert "experts" in {row.kind for row in adapted.report.rows if row.status == "replaced"}
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert set(model.state_dict()) == keys
    adapted.undo()
    with torch.no_grad():
        assert torch.equal(forward_logits(model, input_ids=token_ids(model, 3)), before)


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_is_one_graph(name: str) -> None:
    model = build(name)
    polysilicon.adapt(model)
    ids, positions = token_ids(model, 1), torch.arange(token_ids(model, 1).shape[1])[None]

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch._dynamo.explain(forward)(ids, positions)
    assert (found.graph_break_count, found.graph_count) == (0, 1), found.break_reasons


def identities(rows: int) -> tuple[Experts, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    up, down = torch.randn(rows, 12, 16) / 4, torch.randn(4, 16, 6) / 4
    return Experts(up, down, identities=2).eval(), up, down


@pytest.mark.parametrize("rows", [4, 6])
def test_identities_give_their_token_back(rows: int) -> None:
    layer, up, down = identities(rows)
    x, weights = torch.randn(5, 16), torch.rand(5, 2)
    # Own experts; own and identity; identities; none; identity and none.
    indices = torch.tensor([[0, 3], [2, 4], [5, 4], [6, 6], [5, 6]])
    wide = [t.double() for t in (x, weights, up[:4], down)]
    own = indices.clamp(max=4)
    given = (wide[0], own, wide[1], wide[2], None, wide[3], None, "silu", True, False, 0.0, 0.0)
    expected = experts.reference(*given)
    for token, slot in ((1, 1), (2, 0), (2, 1), (4, 0)):
        expected[token] += wide[1][token, slot] * wide[0][token]
    y = layer(x, indices, weights)
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[3], torch.zeros(16))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, indices, weights), y, rtol=1e-5, atol=1e-6)


def test_identities_that_do_not_fit_the_stacks_are_refused() -> None:
    with pytest.raises(ValueError, match="identities is -1"):
        Experts(torch.randn(4, 12, 16), torch.randn(4, 16, 6), identities=-1)
    with pytest.raises(ValueError, match="of each of 6 experts"):
        Experts(torch.randn(6, 12, 16), torch.randn(4, 16, 6), identities=1)


def test_a_correction_of_the_logits_changes_the_choice_and_no_weight() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    correction = torch.tensor([0.0, 0.0, 0.0, 9.0])
    router = Router(torch.eye(4), None, correction, top_k=2, scoring="sigmoid_after").eval()
    _, weights, chosen = router(logits)
    assert chosen.tolist() == [[3, 2]]
    assert torch.allclose(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


def test_rows_in_equal_shares_go_to_one_expert_each() -> None:
    torch.manual_seed(1)
    up, down = torch.randn(4, 12, 16) / 4, torch.randn(4, 16, 6) / 4
    layer, x = EqualShares(up, down).eval(), torch.randn(12, 16)
    gate, value = torch.einsum("etd,eid->eti", x.view(4, 3, 16), up).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * value
    expected = torch.einsum("eti,edi->etd", inner, down).reshape(12, 16)
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="11 rows for 4 experts"):
        layer(x[:11])


def test_scores_are_zero_where_nothing_was_chosen_even_when_all_saturate() -> None:
    router = ScoresLike(torch.eye(4), top_k=2, scoring="sigmoid_after").eval()
    scores, logits = router(torch.tensor([[100.0, 300.0, 200.0, -1.0]]))
    assert scores.tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert logits.tolist() == [[100.0, 300.0, 200.0, -1.0]]


def test_a_router_of_all_scores_is_replaced_as_one_that_chooses_by_logits() -> None:
    model = build("llama4_text")
    polysilicon.adapt(model)
    found = [module for module in model.modules() if isinstance(module, ScoresLike)]
    assert found
    assert {module.scoring for module in found} == {"sigmoid_after"}
