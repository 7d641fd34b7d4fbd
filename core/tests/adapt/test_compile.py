"""Adapted models compile whole: one graph, no break, dense and paged."""

from __future__ import annotations

import pytest
import torch

import polysilicon

from .models import tiny

FAMILIES = ("llama", "qwen3", "gemma3_text", "granite", "mistral", "phi3", "olmo2")


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_forward_is_one_graph(kind):
    model = tiny(kind)
    polysilicon.adapt(model)
    ids, positions = torch.randint(3, 256, (1, 12)), torch.arange(12)[None]

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch._dynamo.explain(forward)(ids, positions)
    assert found.graph_break_count == 0, found.break_reasons
    assert found.graph_count == 1


def test_a_compiled_model_gives_the_same_logits():
    model = tiny("qwen3")
    polysilicon.adapt(model)
    ids, positions = torch.randint(3, 256, (1, 12)), torch.arange(12)[None]

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(
            compiled(ids, positions), forward(ids, positions), rtol=1e-5, atol=1e-5
        )
