"""Saving, loading, tying, moving, copying and undoing an adapted model."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import polysilicon
from polysilicon.layers.base import Layer

from .models import tiny

IDS = torch.arange(3, 20)[None]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def classes(model) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules()]


def test_undo_restores_the_module_tree_and_the_config():
    model = tiny("gemma3_text")
    tree, weights = classes(model), dict(model.named_parameters())
    implementation, before = model.config._attn_implementation, logits(model)
    adapted = polysilicon.adapt(model)
    assert any(isinstance(module, Layer) for module in model.modules())
    adapted.undo()
    assert classes(model) == tree
    assert all(dict(model.named_parameters())[name] is p for name, p in weights.items())
    assert model.config._attn_implementation == implementation
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert torch.equal(logits(model), before)


def test_a_model_can_be_adapted_again_after_undo():
    model = tiny("llama")
    polysilicon.adapt(model).undo()
    assert polysilicon.adapt(model).report.missing == ()


def test_adapting_twice_is_refused_with_the_way_out():
    model = tiny("llama")
    polysilicon.adapt(model)
    with pytest.raises(polysilicon.errors.AdaptError, match=r"adapted already: call undo\(\)"):
        polysilicon.adapt(model)


def test_parameters_keep_their_names_objects_and_values():
    model = tiny("llama")
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    state = set(model.state_dict())
    polysilicon.adapt(model)
    after = dict(model.named_parameters())
    assert set(model.state_dict()) == state
    assert list(after) == list(before)
    assert all(after[name] is p and torch.equal(p, value) for name, (p, value) in before.items())


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_saved_model_loads_in_plain_transformers(kind, tmp_path):
    model = tiny(kind)
    before = logits(model)
    polysilicon.adapt(model)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, Layer) for module in plain.modules())
    torch.testing.assert_close(logits(plain), before, rtol=1e-5, atol=1e-5)


def test_tied_weights_stay_tied_in_memory_and_on_disk(tmp_path):
    model = tiny("qwen2", tie_word_embeddings=True)
    polysilicon.adapt(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_no_second_copy_of_the_weights():
    model = tiny("llama")
    polysilicon.adapt(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    assert held == sum(p.numel() * p.element_size() for p in model.parameters())


def test_moving_to_another_dtype_keeps_the_merged_weights_in_step():
    model = tiny("llama")
    polysilicon.adapt(model)
    model.to(torch.float64)
    layer = model.model.layers[0].self_attn
    layer.q_proj.weight.data.zero_()
    hidden = torch.randn(1, 3, 64, dtype=torch.float64)
    merged = layer.polysilicon_self_attention.project(hidden)
    assert merged.dtype == torch.float64
    assert not merged[..., :64].any()
    assert merged[..., 64:].any()


def test_a_deep_copy_is_independent_and_computes_the_same():
    model = tiny("llama")
    polysilicon.adapt(model)
    before = logits(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    torch.testing.assert_close(logits(twin), before, rtol=1e-6, atol=1e-6)


def test_random_state_is_left_as_it_was():
    model = tiny("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    polysilicon.adapt(model)
    assert torch.equal(torch.rand(3), expected)


def test_hidden_states_are_still_captured():
    model = tiny("llama")
    with torch.no_grad():
        before = model(IDS, output_hidden_states=True).hidden_states
        polysilicon.adapt(model)
        after = model(IDS, output_hidden_states=True).hidden_states
    assert len(after) == len(before) == 3
    torch.testing.assert_close(after[1], before[1], rtol=1e-5, atol=1e-5)


def test_another_model_of_the_same_config_object_computes_as_before():
    model = tiny("llama")
    other = AutoModelForCausalLM.from_config(model.config).eval()
    before = logits(other)
    adapted = polysilicon.adapt(model)
    torch.testing.assert_close(logits(other), before)
    adapted.undo()
    assert torch.equal(logits(other), before)
