"""QuantizedLinear keeps a checkpoint's bytes and names, computes with them, and refuses others."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polysilicon import formats
from polysilicon.encoding import encode
from polysilicon.errors import RecordError
from polysilicon.layers import QuantizedLinear
from polysilicon.layers.quantized_weight import unrounded
from polysilicon.ops.verify import same_bits
from polysilicon.prepare import prepare

FORMATS = (
    "fp8_e4m3fn/tensor",
    "fp8_e4m3fn/block:128x128",
    "int8/channel/bfloat16",
    "int4.gptq/group:32",
    "int4.awq/group:64",
    "int4.compressed_tensors/group:32/bfloat16/zeros",
    "mxfp4/group:32",
)


def _tensors(format: str, out: int = 40, width: int = 64, **given: Any) -> dict[str, Tensor]:
    stored = formats.parse(format)
    dense = torch.randn(out, width, generator=torch.Generator().manual_seed(1)) * width**-0.5
    names = formats.code_of(stored).names
    return {names[arg][0]: tensor for arg, tensor in encode(stored, dense, **given).items()}


@pytest.mark.parametrize("format", FORMATS)
def test_state_dict_has_the_checkpoints_names_and_bytes(format: str) -> None:
    tensors = _tensors(format)
    layer = QuantizedLinear(tensors, format, in_features=64).to(torch.bfloat16)
    state = layer.state_dict()
    assert set(state) == set(tensors)
    assert all(same_bits(state[name], tensor) for name, tensor in tensors.items())
    assert all(state[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert layer.problems()["quantized_linear"].dtype == "bfloat16"
    assert layer(torch.randn(2, 3, 64).bfloat16()).shape == (2, 3, 40)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("moved", ["as built", "deepcopy", "pickled", "prepared"])
def test_result_is_that_of_the_dense_weight(format: str, moved: str) -> None:
    layer = QuantizedLinear(_tensors(format), format, bias=torch.randn(40), in_features=64)
    x, wanted = torch.randn(5, 64), layer.dense()
    assert wanted.dtype == torch.float32
    if moved == "deepcopy":
        layer = copy.deepcopy(layer)
    elif moved == "pickled":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        layer = torch.load(file, weights_only=False)
    elif moved == "prepared":
        (row,) = prepare(layer).rows
        assert "quantized_linear" in str(row)
    with torch.inference_mode():
        assert torch.equal(layer(x), F.linear(x, wanted, layer.bias))


@pytest.mark.parametrize(
    ("format", "activation"),
    [("int8/channel", "int8/token"), ("fp8_e4m3fn/channel", "fp8_e4m3fn/token")],
)
def test_quantised_activations_are_near_the_dense_product(format: str, activation: str) -> None:
    layer = QuantizedLinear(_tensors(format), format, activation=activation)
    x = torch.randn(7, 64)
    exact = F.linear(x, layer.dense())
    prepare(layer)
    with torch.inference_mode():
        assert float((layer(x) - exact).abs().max()) < 0.1 * float(exact.abs().max())


def test_static_scale_is_used() -> None:
    tensors = _tensors("fp8_e4m3fn/tensor") | {"input_scale": torch.tensor(0.5)}
    layer = QuantizedLinear(tensors, "fp8_e4m3fn/tensor", activation="fp8_e4m3fn/tensor")
    x = torch.full((1, 64), 1e6)  # beyond what the scale reaches
    reached = torch.full((1, 64), 448 * 0.5)
    torch.testing.assert_close(layer(x), F.linear(reached, layer.dense()))


def _act_order() -> Tensor:
    return torch.randperm(64, generator=torch.Generator().manual_seed(2)).int() // 32


def test_act_order_is_followed_and_a_plain_order_costs_nothing() -> None:
    g_idx = _act_order()
    shuffled = QuantizedLinear(_tensors("int4.gptq/group:32", g_idx=g_idx), "int4.gptq/group:32")
    assert shuffled.problems()["quantized_linear"].fact("act_order") is True
    x = torch.randn(3, 64)
    torch.testing.assert_close(shuffled(x), F.linear(x, shuffled.dense()))
    plain = QuantizedLinear(
        _tensors("int4.gptq/group:32", g_idx=torch.arange(64).int() // 32), "int4.gptq/group:32"
    )
    assert plain.problems()["quantized_linear"].fact("act_order") is False
    plain.load_state_dict(shuffled.state_dict())
    assert plain.problems()["quantized_linear"].fact("act_order") is True
    assert torch.equal(plain(x), shuffled(x))


def test_layer_built_on_meta_is_filled_by_load_state_dict() -> None:
    tensors = _tensors("int4.gptq/group:32", g_idx=_act_order())
    with torch.device("meta"):
        empty = {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}
    layer = QuantizedLinear(empty, "int4.gptq/group:32")
    layer.load_state_dict(tensors, assign=True)
    wanted = QuantizedLinear(tensors, "int4.gptq/group:32")
    x = torch.randn(2, 64)
    assert torch.equal(layer(x), wanted(x))


def test_parameters_stay_the_same_objects() -> None:
    tensors = _tensors("fp8_e4m3fn/channel")
    weight = nn.Parameter(tensors["weight"], requires_grad=False)
    layer = QuantizedLinear({**tensors, "weight": weight}, "fp8_e4m3fn/channel")
    assert dict(layer.named_parameters()) == {"weight": weight}
    assert list(dict(layer.named_buffers())) == ["weight_scale", "dtype_mark"]


def test_bias_follows_a_cast_and_stored_tensors_do_not() -> None:
    layer = QuantizedLinear(_tensors("int8/channel"), "int8/channel", bias=torch.randn(40))
    layer.half()
    assert (layer.bias.dtype, layer.weight_scale.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_layer_compiles_to_one_graph_before_and_after_prepare(format: str) -> None:
    layer = QuantizedLinear(_tensors(format), format, in_features=64)
    x = torch.randn(2, 64)
    with torch.inference_mode():
        wanted = layer(x)
        torch.compiler.reset()
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), wanted)
        prepare(layer)
        torch.compiler.reset()
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), wanted)


def _without(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


GPTQ = _tensors("int4.gptq/group:32")
FP8 = _tensors("fp8_e4m3fn/channel")


@pytest.mark.parametrize(
    ("tensors", "format", "more", "error", "message"),
    [
        (FP8, "fp8/channel", {}, RecordError, "ambiguous"),
        (_without("scales", GPTQ), "int4.gptq/group:32", {}, ValueError, "needs scales: it has"),
        (GPTQ, "int4.awq/group:32", {}, ValueError, r"expected \(1, 320\) for"),
        ({**GPTQ, "bits": FP8["weight"]}, "int4.gptq/group:32", {}, ValueError, "bits belong to"),
        (GPTQ, "int4.gptq/group:64", {}, ValueError, r"shape \(2, 40\), expected \(1, 40\)"),
        (
            {**GPTQ, "scales": GPTQ["scales"].float()},
            "int4.gptq/group:32",
            {},
            TypeError,
            "scales is torch.float32, expected float16",
        ),
        (
            {**GPTQ, "g_idx": torch.full((64,), 2).int()},
            "int4.gptq/group:32",
            {},
            ValueError,
            "g_idx names group 2, and 64 inputs .* have groups 0 to 1",
        ),
        (
            {**FP8, "weight": FP8["weight"].view(torch.float8_e4m3fnuz)},
            "fp8_e4m3fn/channel",
            {},
            TypeError,
            "weight is torch.float8_e4m3fnuz, expected float8_e4m3fn",
        ),
        (FP8, "fp8_e4m3fn/channel", {"bias": torch.zeros(3)}, ValueError, r"expected \(40,\)"),
        (FP8, "fp8_e4m3fn/channel", {"in_features": 32}, ValueError, "takes 64 inputs"),
        (
            FP8,
            "fp8_e4m3fn/channel",
            {"activation": "fp8_e4m3fn/tensor"},
            ValueError,
            "no static scale",
        ),
        (
            {**FP8, "input_scale": torch.ones(())},
            "fp8_e4m3fn/channel",
            {"activation": "fp8_e4m3fn/token"},
            ValueError,
            "a static scale",
        ),
        (
            _tensors("int4.compressed_tensors/group:32"),
            "int4.compressed_tensors/group:32",
            {},
            ValueError,
            "give weight_shape or in_features",
        ),
        (
            _tensors("int4.compressed_tensors/group:32/float16/zeros"),
            "int4.compressed_tensors/group:32",
            {"in_features": 64},
            ValueError,
            "write int4.compressed_tensors/group:32/float16/zeros",
        ),
    ],
)
def test_tensors_that_are_no_such_weight_are_refused(
    tensors: dict[str, Tensor],
    format: str,
    more: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        QuantizedLinear(tensors, format, **more)


@pytest.mark.parametrize(
    ("format", "activation"),
    [("int8/channel", "int8/token"), ("fp8_e4m3fn/channel", "fp8_e4m3fn/token")],
)
def test_unrounded_leaves_the_input_as_it_is_and_only_while_it_lasts(
    format: str, activation: str
) -> None:
    layer = QuantizedLinear(_tensors(format), format, activation=activation)
    prepare(layer)
    x = torch.randn(7, 64)
    with torch.inference_mode():
        rounded, exact = layer(x), F.linear(x, layer.dense())
        with unrounded(nn.Sequential(layer)) as rounding:
            assert rounding
            assert torch.equal(layer(x), exact)
        assert torch.equal(layer(x), rounded)
        assert not torch.equal(rounded, exact)


def test_unrounded_finds_no_layer_that_takes_its_input_as_it_is() -> None:
    with unrounded(QuantizedLinear(FP8, "fp8_e4m3fn/channel")) as rounding:
        assert not rounding
