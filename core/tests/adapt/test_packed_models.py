"""A plugin with its own weight layout serves an adapted model: same tokens, same state dict."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

import polysilicon
from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import PolysiliconWarning
from polysilicon.layers.packed_weight import PackedParameter
from polysilicon.prepare import prepare
from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite
from polysilicon.testing.subject import subject

from .models import tiny

IDS = torch.arange(3, 20)[None]
DEVICE = "tiles:t1"


@pytest.fixture(autouse=True)
def _plugin(install) -> None:
    install("tiles")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def generated(model) -> list[int]:
    return model.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()


def weights(model) -> list:
    found = [getattr(module, "packed_weight", None) for module in model.modules()]
    return [weight for weight in found if weight is not None]


def packed(kind="llama", **settings):
    """A model, adapted and prepared, with its state dict and tokens from before."""
    model = tiny(kind, **settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens, wanted = generated(model), logits(model)
    adapted = polysilicon.adapt(model)
    return model, adapted, prepare(model, DEVICE), before, tokens, wanted


def equal(state, before) -> bool:
    return list(state) == list(before) and all(torch.equal(state[k], before[k]) for k in before)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma3_text"])
def test_same_tokens_and_state_dict_after_packing(kind):
    model, _, prepared, before, tokens, wanted = packed(kind)
    assert weights(model)
    assert generated(model) == tokens
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    assert equal(model.state_dict(), before)
    rows = {row.kernel: row for row in prepared.rows}
    assert rows["linear.tiles_few"].layouts == {"weight": "tiles.weight"}
    calls = importlib.import_module("tiles_kernels").calls
    assert calls["few"]
    assert calls["many"]


def test_memory_holds_one_copy_of_each_weight():
    model, *_ = packed()
    with torch._C.DisableTorchFunctionSubclass():
        kept = sum(p.untyped_storage().nbytes() for p in model.parameters())
    plain = [p for p in model.parameters() if not isinstance(p, PackedParameter)]
    logical = sum(p.nbytes for p in plain)
    placeholders = len(list(model.parameters())) - len(plain)
    assert kept == logical + 4 * placeholders
    held = weights(model)
    assert len(held) == 8  # of each of two blocks: qkv, out, gate and up, down
    assert all(weight.packed.padding.elements == 0 for weight in held)  # 64 and 96 are whole tiles


def test_undo_gives_the_original_back_and_frees_the_packed_weights():
    model, adapted, _, before, tokens, wanted = packed()
    parameters = dict(model.named_parameters())
    physical = [weakref.ref(weight.packed.physical) for weight in weights(model)]
    adapted.undo()
    gc.collect()
    assert not any(ref() is not None for ref in physical)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(type(p) is torch.nn.Parameter for p in parameters.values())
    assert equal(model.state_dict(), before)
    assert torch.equal(logits(model), wanted)
    assert generated(model) == tokens


def test_saved_model_loads_in_plain_transformers(tmp_path):
    model, _, _, before, _, wanted = packed()
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert equal(plain.state_dict(), before)
    assert torch.equal(logits(plain), wanted)


def test_tied_weights_stay_tied():
    model, *_ = packed("qwen2", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head.weight) is torch.nn.Parameter


def test_copies_loads_and_moves_see_logical_weights():
    model, _, _, before, tokens, _ = packed()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert equal(twin.state_dict(), before)
    assert generated(twin) == tokens
    for assign in (False, True):
        model.load_state_dict(before, assign=assign)
        assert generated(model) == tokens
        assert len(weights(model)) == 8
    with pytest.warns(PolysiliconWarning, match="layers were moved to bfloat16"):
        model.to(torch.bfloat16)
    assert not weights(model)
    assert logits(model).isfinite().all()
    assert all(torch.equal(v, before[k].bfloat16()) for k, v in model.state_dict().items())


def test_compiled_model_is_one_graph():
    model, *_, wanted = packed()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        result = compiled(IDS, use_cache=False).logits
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


def test_the_engine_runs_on_packed_weights_and_gives_them_back():
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prompts = [list(range(3, 20)), [5, 6, 7]]
    greedy = SamplingParams(max_new_tokens=6)
    usual = [
        o.token_ids for o in Engine(copy.deepcopy(model), device="cpu").generate(prompts, greedy)
    ]
    adapted = polysilicon.adapt(model)
    engine = Engine(adapted, device=DEVICE)
    assert [output.token_ids for output in engine.generate(prompts, greedy)] == usual
    assert len(weights(model)) == 8
    rows = {row.kernel: row.layouts for row in engine.report().ops if row.op == "linear"}
    assert rows["linear.tiles_few"] == {"weight": "tiles.weight"}
    assert equal(model.state_dict(), before)
    # Another device's engine on the same model makes the weights plain first.
    again = Engine(adapted, device="cpu")
    assert not weights(model)
    assert [output.token_ids for output in again.generate(prompts, greedy)] == usual


def test_the_suite_packs_for_such_kernels():
    class Tiles(DeviceUnderTest):
        plugin = "tiles"
        device = DEVICE

    found = subject(Tiles)
    assert {layout.name for layout in found.layouts} == {"tiles.weight", "tiles.turned"}
    for suite in (
        type("Plugin", (Tiles, PluginSuite), {}),
        type("Ops", (Tiles, OpSuite), {}),
        type("Layouts", (Tiles, LayoutSuite), {}),
        type("Layers", (Tiles, LayerSuite), {}),
    ):
        cases = [case for case in suite.cases(found) if "RotaryEmb" not in case.id]
        findings = [finding for case in cases for finding in suite.look(found, case)]
        assert [finding.text for finding in findings if finding.text] == []
        passed = {name for f in findings if not f.skipped for name in f.names}
        assert passed & {"linear.tiles_few", "tiles.turned", "GatedMLP", "plugin"}
