"""Attention that a model computes in its own code becomes ours, or stays with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polysilicon
from polysilicon.adapt import tiny as tiny_models
from polysilicon.adapt.attention_notes import notes
from polysilicon.adapt.attention_sites import Watch
from polysilicon.adapt.probe import Unverified, call
from polysilicon.engine import SamplingParams
from polysilicon.errors import AdaptError

#: Architecture → why the engine does not run it; None where it does.
ARCHITECTURES = {
    "bloom": "get a bias",
    "falcon": None,
    "git": None,
    "gpt_neo": None,
    "gpt_neox_japanese": None,
    "mpt": "get a bias",
    "openai-gpt": None,
    "xlm": "not causal",
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, **settings):
    config = tiny_models.tiny_config(kind)
    for name, value in settings.items():
        setattr(config, name, value)
    return tiny_models.tiny_model(config, dtype=dtype)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts past the windows of the tiny models, the second padded on the left."""
    ids = torch.randint(48, 160, (2, 13), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    return ids, mask


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=prompts()[0]).logits


def tokens(model, **settings) -> torch.Tensor:
    ids, mask = prompts()
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=7, do_sample=False, eos_token_id=None, **settings
    )


def attention_rows(adapted) -> list:
    """Those of the text model: no prompt reaches an image tower."""
    rows = [row for row in adapted.report.rows if row.kind == "attention"]
    return [row for row in rows if "image_encoder" not in row.path]


@pytest.mark.parametrize(("kind", "paged"), ARCHITECTURES.items())
def test_its_attention_is_ours_and_logits_stay(kind, paged):
    model = tiny(kind)
    before = logits(model)
    adapted = polysilicon.adapt(model)
    assert {row.status for row in attention_rows(adapted)} == {"replaced"}
    assert len(adapted.attention) == len(attention_rows(adapted))
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    if paged is None:
        assert adapted.report.paged is None
    else:
        assert paged in adapted.report.paged


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "no_cache"]
)
def test_tokens_are_transformers_own(kind, settings):
    model = tiny(kind)
    before = tokens(model, **settings)
    polysilicon.adapt(model)
    assert torch.equal(tokens(model, **settings), before)


@pytest.mark.parametrize("kind", ["falcon", "bloom", "gpt_neox_japanese"])
def test_tokens_through_a_static_cache_are_transformers_own(kind):
    settings = {"cache_implementation": "static", "disable_compile": True}
    model = tiny(kind)
    before = tokens(model, **settings)
    polysilicon.adapt(model)
    assert torch.equal(tokens(model, **settings), before)


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "bloom", "mpt"])
def test_bfloat16_error_stays_within_twice_transformers_own(kind):
    exact = logits(tiny(kind))
    short = tiny(kind, torch.bfloat16)
    theirs = logits(short).float()
    adapted = polysilicon.adapt(short)
    assert {row.status for row in attention_rows(adapted)} == {"replaced"}
    ours = logits(short).float()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "bloom", "openai-gpt"])
def test_the_forward_is_one_graph(kind):
    model = tiny(kind)
    polysilicon.adapt(model)
    ids = prompts()[0]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids), forward(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo"])
def test_undo_puts_the_own_code_back(kind):
    model = tiny(kind)
    before, names = logits(model), dict(model.named_modules())
    polysilicon.adapt(model).undo()
    assert torch.equal(logits(model), before)
    assert dict(model.named_modules()) == names
    assert not any({"forward", "_attn"} & vars(module).keys() for module in model.modules())


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo"])
def test_a_deep_copy_attends_with_its_own_layers(kind):
    model = tiny(kind)
    polysilicon.adapt(model)
    twin = copy.deepcopy(model)
    before = logits(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(logits(twin), before)


def test_falcon_with_alibi_is_adapted_and_refused_by_the_engine():
    model = tiny("falcon", alibi=True)
    before = tokens(model)
    adapted = polysilicon.adapt(model)
    assert {row.status for row in attention_rows(adapted)} == {"replaced"}
    assert "get a bias" in adapted.report.paged
    assert torch.equal(tokens(model), before)


@pytest.mark.parametrize("heads", [{"multi_query": False}, {"new_decoder_architecture": True}])
def test_falcon_with_other_heads(heads):
    model = tiny("falcon", **heads)
    before = logits(model)
    adapted = polysilicon.adapt(model)
    assert adapted.report.paged is None
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_by_its_eager_code(alibi):
    model = tiny("falcon", alibi=alibi)
    model.set_attn_implementation("eager")
    before = tokens(model)
    adapted = polysilicon.adapt(model)
    assert {row.status for row in attention_rows(adapted)} == {"replaced"}
    assert torch.equal(tokens(model), before)


@pytest.mark.parametrize(
    ("kind", "limit"), [("gpt_neo", "max_position_embeddings"), ("openai-gpt", "n_positions")]
)
def test_the_engine_packs_more_tokens_than_the_model_has_positions(kind, limit):
    model = tiny(kind, **{limit: 24})
    engine = polysilicon.Engine(
        polysilicon.adapt(model), max_batch=3, block_size=4, num_blocks=20, compile=False
    )
    ids = torch.randint(48, 160, (3, 13), generator=torch.Generator().manual_seed(3))
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    outputs = engine.generate(ids.tolist(), params)
    found = torch.tensor([output.token_ids for output in outputs])
    with torch.no_grad():
        best = model(input_ids=torch.cat([ids, found], dim=1)).logits[:, 12:-1].argmax(-1)
    assert torch.equal(found, best)


def test_gpt_neo_has_its_window_in_every_other_layer():
    adapted = polysilicon.adapt(tiny("gpt_neo"))
    assert [layer.window for layer in adapted.attention[:2]] == [0, tiny_models.WINDOW]


def test_attention_weights_are_refused_by_name():
    model = tiny("gpt_neo")
    adapted = polysilicon.adapt(model)
    with pytest.raises(AdaptError, match="output_attentions=True"):
        model(input_ids=prompts()[0], output_attentions=True)
    with pytest.raises(AdaptError, match="output_attentions=True"):
        model.transformer(input_ids=prompts()[0], output_attentions=True)
    adapted.undo()
    assert model(input_ids=prompts()[0], output_attentions=True).attentions[0] is not None


class Straight(nn.Module):
    """Attention written as straight steps, with a name that is set and read on the way."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.power = power

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2)
        scale = k.shape[-1] ** -0.5
        scores = (scores * scale) ** self.power
        if mask is not None:
            mask = mask * 2
            scores += mask
        weights = F.softmax(scores, dim=-1)
        out = weights @ v
        return out.transpose(1, 2).flatten(2)


class Looped(Straight):
    """Attends one head at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        out = []
        for head in range(4):
            part = slice(4 * head, 4 * head + 4)
            weights = torch.softmax(torch.matmul(q[..., part], k[..., part].mT), -1)
            out.append(torch.matmul(weights, v[..., part]))
        return torch.cat(out, -1)


def noted(module: nn.Module, *args):
    with torch.no_grad():
        with Watch([module]) as watch:
            module(*args)
        (site,) = watch.sites[module]
        return notes(module, site, call(*args))[0]


def test_scale_and_bias_are_told_by_what_the_code_does():
    x, mask = torch.randn(2, 5, 16), torch.randn(2, 1, 5, 5)
    seen = noted(Straight(), x, mask)
    assert seen.scale == pytest.approx(0.5)
    assert seen.score_heads == 1
    torch.testing.assert_close(seen.bias, 2 * mask)
    assert seen.is_biased()


def test_a_bias_by_head_keeps_its_heads():
    seen = noted(Straight(), torch.randn(2, 5, 16), torch.randn(1, 4, 5, 5))
    assert seen.bias.shape == (2, 4, 5, 5)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("xlnet", "written as einsum"), ("prophetnet", "in 2 places"), ("reformer", "no softmax")],
)
def test_what_stays_has_its_reason(kind, reason):
    adapted = polysilicon.adapt(tiny(kind))
    assert {row.status for row in attention_rows(adapted)} == {"kept"}
    assert any(reason in row.reason for row in attention_rows(adapted))


def test_code_that_asks_for_the_implementations_name_gets_its_own():
    model = tiny("deepseek_v32")
    before, name = tokens(model), model.config._attn_implementation
    adapted = polysilicon.adapt(model)
    assert {row.status for row in attention_rows(adapted)} == {"replaced"}
    assert "its mask was not built by" in adapted.report.paged
    assert torch.equal(tokens(model), before)
    twin = copy.deepcopy(model)
    adapted.undo()
    assert model.config._attn_implementation == name
    assert torch.equal(tokens(model), before)
    assert torch.equal(tokens(twin), before)


def test_modules_that_the_first_prompt_exchanges_are_adapted():
    adapted = polysilicon.adapt(tiny("big_bird"))
    assert {row.status for row in attention_rows(adapted)} == {"replaced"}
    assert adapted.report.paged is None


def test_scores_that_are_no_multiple_of_the_product_are_refused():
    with pytest.raises(Unverified, match="no multiple"):
        noted(Straight(power=3), torch.randn(2, 5, 16))


def test_attention_in_a_loop_is_refused():
    with pytest.raises(Unverified, match="in a loop"):
        noted(Looped(), torch.randn(2, 5, 16))
