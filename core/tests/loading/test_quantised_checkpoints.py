"""Quantised checkpoints: each format's layout loads, keeps its bytes, and gives its own numbers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import quantised_checkpoints as checkpoints
import torch
from loading_models import logits, tiny_model
from test_load_folder import edit_config

import polysilicon
from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import LoadError
from polysilicon.layers import QuantizedLinear
from polysilicon.loading import load
from polysilicon.ops.verify import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {"hidden_size": 128, "intermediate_size": 256}
#: Neither dim of the blocks of 128 divides it.
UNEVEN = {"hidden_size": 128, "intermediate_size": 160}


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint: its config, its writer, and what its layers are in our words."""

    config: dict[str, Any]
    encode: Callable[[str, torch.Tensor], checkpoints.Written]
    format: str
    inputs: str = ""
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)


def _weight(
    encode: Callable[..., checkpoints.Written], **options: Any
) -> Callable[[str, torch.Tensor], checkpoints.Written]:
    return lambda name, weight: encode(weight, **options)


def _gptq(format: str, **options: Any) -> Case:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return Case({**config, **options}, _weight(checkpoints.gptq, **options), format)


def _compressed(
    layout: str,
    weights: dict[str, Any],
    encode: Callable[[str, torch.Tensor], checkpoints.Written],
    format: str,
    inputs: str = "",
    activations: dict[str, Any] | None = None,
) -> Case:
    """A checkpoint of compressed-tensors as llm-compressor writes its config."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "actorder": None, **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return Case(config, encode, format, inputs)


def _packed(format: str, bits: int = 4, **options: Any) -> Case:
    size = options.get("group_size", 32)
    weights = {"num_bits": bits, "type": "int", "group_size": size}
    weights["strategy"] = "channel" if size is None else "group"
    weights["symmetric"] = options.get("symmetric", True)
    weights["actorder"] = "group" if options.get("act_order") else None
    encode = _weight(checkpoints.pack_quantized, bits=bits, **options)
    return _compressed("pack-quantized", weights, encode, format)


DYNAMIC = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}

CASES = {
    "gptq": _gptq("int4.gptq/group:32/float16/zeros"),
    "gptq group 64": _gptq("int4.gptq/group:64/float16/zeros", group_size=64, sym=False),
    "gptq group 128": _gptq("int4.gptq/group:128/float16/zeros", group_size=128),
    "gptq no groups": _gptq("int4.gptq/channel/float16/zeros", group_size=-1, sym=False),
    "gptq act-order": _gptq("int4.gptq/group:32/float16/zeros", desc_act=True, sym=False),
    "gptq 8 bits": _gptq("int8.gptq/group:32/float16/zeros", bits=8),
    "gptq_v2": _gptq("int4.gptq_v2/group:32/float16/zeros", checkpoint_format="gptq_v2", sym=False),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        _weight(checkpoints.awq),
        "int4.awq/group:32/float16/zeros",
    ),
    "awq group 128": Case(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"},
        _weight(checkpoints.awq, group_size=128),
        "int4.awq/group:128/float16/zeros",
    ),
    "W4A16": _packed("int4.compressed_tensors/group:32/bfloat16"),
    "W4A16 group 128": _packed("int4.compressed_tensors/group:128/bfloat16", group_size=128),
    "W4A16 zeros": _packed(
        "int4.compressed_tensors/group:64/bfloat16/zeros", group_size=64, symmetric=False
    ),
    "W4A16 act-order": _packed("int4.compressed_tensors/group:32/bfloat16", act_order=True),
    "W8A16": _packed("int8.compressed_tensors/channel/bfloat16", 8, group_size=None),
    "W8A8": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        _weight(checkpoints.int8_channel),
        "int8/channel/bfloat16",
        "int8",
        {**DYNAMIC, "type": "int"},
    ),
    "float-quantized": _compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        _weight(checkpoints.fp8_channel),
        "fp8_e4m3fn/channel/float32",
        "token",
        {**DYNAMIC, "type": "float"},
    ),
    "float-quantized, static": _compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        _weight(checkpoints.fp8_tensor, static="input_scale"),
        "fp8_e4m3fn/tensor/float32",
        "static",
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    ),
    "fp8 blocks": Case(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        _weight(checkpoints.fp8_blocks),
        "fp8_e4m3fn/block:128x128/float32",
        "group",
        UNEVEN,
    ),
    "fp8 blocks ue8m0": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        _weight(checkpoints.fp8_blocks, ue8m0=True),
        "fp8_e4m3fn/block:128x128/float8_e8m0fnu",
        "group",
        UNEVEN,
    ),
    "fp8 tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        _weight(checkpoints.fp8_tensor),
        "fp8_e4m3fn/tensor/float32",
        "token",
    ),
    "fp8 tensor, static": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        _weight(checkpoints.fp8_tensor, name="weight_scale_inv", static="activation_scale"),
        "fp8_e4m3fn/tensor/float32",
        "static",
    ),
    "fp8 channel": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        _weight(checkpoints.fp8_channel),
        "fp8_e4m3fn/channel/float32",
        "token",
    ),
}


def _written(folder: Path, case: Case, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = tiny_model("llama", **case.sizes, **changes)
    state = checkpoints.write(folder, model, case.config, case.encode, inputs=case.inputs)
    return model, state


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_gives_the_dequantised_models_logits_and_its_own_bytes(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    reference, state = _written(tmp_path, case)
    model: Any = load(tmp_path).model
    ours = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert {str(layer.format) for layer in ours} == {case.format}
    assert len(ours) == 2 * 7
    wanted = logits(reference)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    kept = model.state_dict()
    assert kept.keys() == state.keys()
    assert all(same_bits(kept[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("name", CASES)
def test_the_engine_gives_the_dequantised_models_greedy_tokens(name: str, tmp_path: Path) -> None:
    reference, _ = _written(tmp_path, CASES[name])
    engine = Engine(load(tmp_path), max_batch=2, block_size=4, num_blocks=48, compile=False)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 40, 41, 42, 43, 44, 45, 46, 47]]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.inference_mode():
            found = reference(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        chosen = found.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Its own best at every step, unless two are closer than rounding.
        assert (found.amax(-1) - chosen).max() < 1e-4


def test_adapt_leaves_the_layers_and_replaces_what_is_around_them(tmp_path: Path) -> None:
    reference, state = _written(tmp_path, CASES["gptq"])
    model: Any = load(tmp_path).model
    adapted = polysilicon.adapt(model)
    assert not [row for row in adapted.report.rows if row.status == "kept"]
    linears = [row for row in adapted.report.rows if row.replaced_by == "QuantizedLinear"]
    assert len(linears) == 2 * 7
    assert "packed as in the checkpoint" in linears[0].reason
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=1e-5)
    assert model.state_dict().keys() == state.keys()
    adapted.undo()
    assert isinstance(model.model.layers[0].mlp.down_proj, QuantizedLinear)
    torch.testing.assert_close(logits(model), logits(reference), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gptq act-order", "fp8 blocks"])
def test_a_saved_model_is_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    _, state = _written(tmp_path / "one", CASES[name])
    model: Any = load(tmp_path / "one").model
    model.save_pretrained(tmp_path / "two")
    again: Any = load(tmp_path / "two").model
    assert torch.equal(logits(again), logits(model))
    kept = again.state_dict()
    assert all(same_bits(kept[key], tensor) for key, tensor in state.items())


def test_the_asked_dtype_is_that_of_activations_and_plain_tensors(tmp_path: Path) -> None:
    _written(tmp_path, CASES["gptq"])
    model: Any = load(tmp_path, dtype="bfloat16").model
    layer = model.model.layers[0].mlp.up_proj
    assert (model.dtype, layer.scales.dtype) == (torch.bfloat16, torch.float16)
    assert layer.problems()["quantized_linear"].dtype == "bfloat16"
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert polysilicon.adapt(model).report.dtype == "bfloat16"


def test_a_quantised_head_and_biases_are_loaded(tmp_path: Path) -> None:
    model = tiny_model("llama", **SIZES, attention_bias=True)
    case = CASES["gptq"]
    config = {**case.config, "lm_head": True}
    checkpoints.write(tmp_path, model, config, case.encode, plain=("none",))
    ours: Any = load(tmp_path).model
    assert isinstance(ours.lm_head, QuantizedLinear)
    assert ours.model.layers[0].self_attn.q_proj.bias is not None
    torch.testing.assert_close(logits(ours), logits(model), rtol=0, atol=1e-5)


def test_a_tied_head_stays_the_embedding(tmp_path: Path) -> None:
    reference, state = _written(tmp_path, CASES["awq"], tie_word_embeddings=True)
    del state["lm_head.weight"]
    checkpoints.save(tmp_path, reference, state, CASES["awq"].config)
    ours: Any = load(tmp_path).model
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    torch.testing.assert_close(logits(ours), logits(reference), rtol=0, atol=1e-5)


def test_biases_of_a_model_that_has_none_are_added(tmp_path: Path) -> None:
    reference, state = _written(tmp_path, CASES["gptq"])
    for name, module in reference.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            module.bias = torch.nn.Parameter(torch.randn(module.out_features) * 0.1)
            state[f"{name}.bias"] = module.bias.detach()
    checkpoints.save(tmp_path, reference, state, CASES["gptq"].config)
    ours: Any = load(tmp_path).model
    torch.testing.assert_close(logits(ours), logits(reference), rtol=0, atol=1e-5)
    assert ours.state_dict().keys() == state.keys()


def test_gptqs_dynamic_field_is_followed(tmp_path: Path) -> None:
    model = tiny_model("llama", **SIZES)
    config = CASES["gptq"].config | {
        "dynamic": {r"-:.*\.down_proj": {}, r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": 64}}
    }
    first, second = ({"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 64})
    checkpoints.write(
        tmp_path,
        model,
        config,
        lambda name, w: checkpoints.gptq(w, **(second if "layers.1" in name else first)),
        plain=("lm_head", "down_proj"),
    )
    ours: Any = load(tmp_path).model
    layers = ours.model.layers
    assert str(layers[0].mlp.up_proj.format) == "int4.gptq/group:32/float16/zeros"
    assert str(layers[1].mlp.up_proj.format) == "int8.gptq/group:64/float16/zeros"
    assert isinstance(layers[1].mlp.down_proj, torch.nn.Linear)
    torch.testing.assert_close(logits(ours), logits(model), rtol=0, atol=1e-5)


GPTQ, FP8, AWQ = (CASES[name].config for name in ("gptq", "fp8 blocks", "awq"))
W4 = CASES["W4A16"].config


def _group(**changes: Any) -> dict[str, Any]:
    """The config of a W4A16 checkpoint with other weights or inputs."""
    group = W4["config_groups"]["group_0"]
    weights = {**group["weights"], **changes.pop("weights", {})}
    return {**W4, "config_groups": {"group_0": {**group, "weights": weights, **changes}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quip"}, r"quant_method is 'quip', expected one of 'gptq'"),
        ([1], r"quantization_config is \[1\], expected a JSON object"),
        ({**GPTQ, "bits": 3}, r"quantization_config\.bits is 3, expected one of 4, 8"),
        ({**GPTQ, "group_size": 0}, r"group_size is 0, expected a number of inputs, or -1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin', expected one"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 2}}}, r"dynamic\['\+:\.\*'\]\.bits is 2"),
        ({**AWQ, "version": "gemv"}, r"version is 'gemv', expected one of 'gemm', 'GEMM'"),
        ({**AWQ, "zero_point": False}, r"zero_point is False, expected one of True"),
        ({**AWQ, "bits": 8}, r"bits is 8, expected one of 4"),
        ({**W4, "format": "marlin-24"}, r"quantization_config\.format is 'marlin-24', expected"),
        ({**W4, "kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme is .*, expected none"),
        ({**W4, "config_groups": {}}, r"config_groups is \{\}, expected at least one group"),
        (_group(weights={"num_bits": 3}), r"group_0\.weights\.num_bits is 3, expected one of 4, 8"),
        (_group(weights={"strategy": "tensor"}), r"weights\.strategy is 'tensor', expected one"),
        (
            _group(input_activations={**DYNAMIC, "symmetric": False}),
            r"input_activations\.symmetric is False, expected one of True",
        ),
        (
            _group(input_activations={**DYNAMIC, "strategy": "tensor"}),
            r"input_activations\.strategy is 'tensor', expected one of 'token', 'group'",
        ),
        (_group(output_activations={"num_bits": 8}), r"output_activations is .*, expected none"),
        ({**FP8, "fmt": "e5m2"}, r"fmt is 'e5m2', expected one of 'e4m3'"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\], expected two"),
        ({**FP8, "activation_scheme": "static"}, r"activation_scheme is 'static', expected 'dyn"),
    ],
)
def test_a_config_that_is_not_supported_names_the_field(
    config: Any, message: str, tmp_path: Path
) -> None:
    _written(tmp_path, CASES["gptq"])
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(LoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"group_size": 64}, r"down_proj\.weight: .*shape \(8, 128\), expected \(4, 128\)"),
        ("gptq", {"quant_method": "fp8"}, "has no tensors of that method"),
        (
            "gptq",
            {"dynamic": {"-:.*up_proj": {}}},
            r"up_proj\.weight is stored quantised and config",
        ),
        (
            "W4A16",
            {"ignore": ["re:.*up_proj"]},
            r"up_proj\.weight is stored quantised and config.json says",
        ),
        ("fp8 channel", {"weight_block_size": [128, 128]}, r"weight_scale has shape \(128, 1\)"),
        ("fp8 tensor", {"activation_scheme": "static"}, "no static scale"),
    ],
)
def test_weights_that_are_not_as_the_config_says_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _written(tmp_path, CASES[name])
    edit_config(tmp_path, quantization_config={**CASES[name].config, **changes})
    with pytest.raises(LoadError, match=message):
        load(tmp_path)


def test_an_order_that_the_checkpoint_does_not_hold_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, CASES["W4A16"])
    config = copy.deepcopy(dict(CASES["W4A16"].config))
    for group in config["config_groups"].values():
        group["weights"]["actorder"] = "group"
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(LoadError, match=r"down_proj.* grouped by a g_idx .* has none for it"):
        load(tmp_path)


def test_quantised_weights_without_a_config_are_not_read_as_plain_ones(tmp_path: Path) -> None:
    _written(tmp_path, CASES["fp8 channel"])
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(LoadError, match=r"stored as float8_e4m3fn .*need the quantization_config"):
        load(tmp_path)


def test_weights_that_the_model_leaves_in_the_checkpoint_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, _ = _written(tmp_path, CASES["gptq"])
    reference.model.layers = reference.model.layers[:1]
    edit_config(tmp_path, num_hidden_layers=1)
    patterns = [r"model\.layers\.1\..*"]
    monkeypatch.setattr(type(reference), "_keys_to_ignore_on_load_unexpected", patterns)
    torch.testing.assert_close(logits(load(tmp_path).model), logits(reference), rtol=0, atol=1e-5)


def test_a_weight_without_its_module_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, CASES["gptq"])
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(
        LoadError, match=r"model\.layers\.1\S+ is stored quantised .* no linear layer"
    ):
        load(tmp_path)
