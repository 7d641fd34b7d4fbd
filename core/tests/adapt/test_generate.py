"""After adapt(), generate() works as before: same tokens, every cache, padding and beams."""

from __future__ import annotations

import pytest
import torch

import polysilicon

from .models import tiny

KINDS = ("llama", "gemma3_text", "mistral")


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the second padded on the left; longer than the windows of the tiny models."""
    ids = torch.randint(3, 256, (2, 13), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    return ids, mask


def tokens(model, **settings) -> torch.Tensor:
    ids, mask = prompts()
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None, **settings
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3},
        {"use_cache": False},
    ],
    ids=["dynamic", "static", "beams", "no_cache"],
)
def test_tokens_are_transformers_own(kind, settings):
    model = tiny(kind)
    before = tokens(model, **settings)
    polysilicon.adapt(model)
    assert torch.equal(tokens(model, **settings), before)


def test_chunked_prefill_through_the_cache_gives_the_same_logits():
    model = tiny("gemma3_text")
    ids, _ = prompts()

    def chunked() -> torch.Tensor:
        with torch.no_grad():
            first = model(ids[:1, :6], use_cache=True)
            name = "cache" if "cache" in first else "past_key_values"  # before Transformers 5.24
            return model(ids[:1, 6:], **{name: first[name]}, use_cache=True).logits

    before = chunked()
    polysilicon.adapt(model)
    torch.testing.assert_close(chunked(), before, rtol=1e-5, atol=1e-5)
