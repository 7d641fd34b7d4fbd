"""What adapt() refuses, and what it leaves alone with the reason."""

from __future__ import annotations

import accelerate
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    GPTQConfig,
)

import polysilicon
from polysilicon.errors import AdaptError

from .models import tiny

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_quantised_checkpoints_are_refused_by_method(method):
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": method}
    with pytest.raises(AdaptError, match=f"quantised with {method}"):
        polysilicon.adapt(model)


def test_a_quantiser_in_memory_is_refused_by_method():
    model = tiny("llama")
    model.config.quantization_config = GPTQConfig(bits=4)
    with pytest.raises(AdaptError, match="quantised with gptq"):
        polysilicon.adapt(model)


def test_tensor_parallel_plans_are_refused():
    model = tiny("llama")
    model._tp_size = 2
    with pytest.raises(AdaptError, match="tensor-parallel plan: load it without"):
        polysilicon.adapt(model)


def test_output_attentions_is_refused_when_asked_for():
    model = tiny("llama")
    polysilicon.adapt(model)
    with pytest.raises(AdaptError, match=r"output_attentions=True .* call undo\(\)"):
        model(IDS, output_attentions=True)


def test_output_attentions_in_the_config_is_refused():
    model = tiny("llama", attn_implementation="eager")
    model.config.output_attentions = True
    with pytest.raises(AdaptError, match=r"config\.output_attentions = False"):
        polysilicon.adapt(model)


def test_prompt_learning_is_refused():
    model = get_peft_model(
        tiny("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(AdaptError, match="PromptTuningConfig"):
        polysilicon.adapt(model)


def test_a_module_that_is_no_transformers_model_is_refused():
    with pytest.raises(AdaptError, match="expected a Transformers model"):
        polysilicon.adapt(nn.Linear(3, 3))


def test_the_wrong_device_is_refused_with_the_way_out():
    with pytest.raises(AdaptError, match=r"call model.to\('cuda'\) first"):
        polysilicon.adapt(tiny("llama"), device="cuda")


def test_a_lora_adapter_goes_on_working():
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = get_peft_model(tiny("llama"), config).eval()
    with torch.no_grad():
        before = model(IDS).logits
        report = polysilicon.adapt(model).report
        after = model(IDS).logits
        with model.disable_adapter():
            without = model(IDS).logits
    assert report.missing == ()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(without, after, atol=1e-3)


def test_meta_modules_stay_with_the_reason():
    model = tiny("llama")
    model.model.layers[1].mlp.to("meta")
    report = polysilicon.adapt(model).report
    reasons = {row.path: row.reason for row in report.kept}
    assert reasons["model.layers.1.mlp.up_proj"] == "its weights are on the meta device"
    assert "model.layers.0.mlp.up_proj" not in reasons
    assert "meta device" in report.paged


def test_modules_with_hooks_stay_with_the_reason():
    model = tiny("llama")
    seen = []
    model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    report = polysilicon.adapt(model).report
    assert {row.path: row.reason for row in report.kept} == {
        "model.norm": "hooks are registered on it"
    }
    model(IDS)
    assert seen


def test_training_mode_is_refused_when_run():
    model = tiny("llama")
    polysilicon.adapt(model)
    model.train()
    with pytest.raises(AdaptError, match=r"training mode.* call model.eval\(\)"):
        model(IDS)


def test_offloaded_modules_stay_with_the_reason():
    model = tiny("llama")
    with torch.no_grad():
        before = model(IDS).logits
    accelerate.cpu_offload(model.model.layers[1], execution_device="cpu")
    report = polysilicon.adapt(model).report
    reasons = {row.path: row.reason for row in report.kept}
    assert "accelerate" in reasons["model.layers.1.mlp.up_proj"]
    assert not any(path.startswith("model.layers.0.") for path in reasons)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
