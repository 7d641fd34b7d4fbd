"""Every dense family is adapted whole and gives Transformers' logits and tokens."""

from __future__ import annotations

import pytest
import torch

import polysilicon

from .models import tiny

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "olmo3",
    "phi3",
    "cohere2",
    "glm",
    "smollm3",
    "starcoder2",
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_module_is_replaced_and_logits_stay(kind):
    model = tiny(kind)
    ids = torch.randint(3, 256, (2, 23))
    with torch.no_grad():
        before = model(ids).logits
        adapted = polysilicon.adapt(model)
        after = model(ids).logits
    assert adapted.report.missing == ()
    assert adapted.report.paged is None
    by = {row.replaced_by for row in adapted.report.rows if row.kind == "attention"}
    assert by == {"SelfAttention"}
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo2"])
def test_bfloat16_error_stays_within_twice_transformers_own(kind):
    model = tiny(kind)
    ids = torch.randint(3, 256, (2, 23))
    with torch.no_grad():
        exact = model(ids).logits
        short = tiny(kind, dtype=torch.bfloat16)
        theirs = short(ids).logits
        report = polysilicon.adapt(short).report
        ours = short(ids).logits
    assert {r.replaced_by for r in report.rows if r.kind == "attention"} == {"SelfAttention"}
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
