"""QuantizedExperts: every token through its experts, with a checkpoint's own bytes and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon import formats
from polysilicon.encoding import encode
from polysilicon.layers import QuantizedExperts
from polysilicon.ops.verify import same_bits
from polysilicon.prepare import prepare

EXPERTS, HIDDEN, INNER = 4, 64, 32


def _tensors(format: str, *, bias: bool = False) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    names = formats.code_of(formats.parse(format)).names
    shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    for key, shape in shapes.items():
        dense = torch.randn(EXPERTS, *shape, generator=rng) * shape[1] ** -0.5
        for argument, tensor in encode(formats.parse(format), dense).items():
            usual = names[argument][-1] if format.startswith("mxfp4") else names[argument][0]
            found[f"{key}_{usual}"] = tensor
        if bias:
            found[f"{key}_bias"] = torch.randn(EXPERTS, shape[0], generator=rng)
    return found


def _mixture(
    layer: QuantizedExperts, x: Tensor, indices: Tensor, weights: Tensor, gate: Any
) -> Tensor:
    """One token and one of its experts at a time, by the dense weights."""
    up, down = layer.dense()
    out = torch.zeros_like(x)
    for token, chosen in enumerate(indices.tolist()):
        for place, expert in enumerate(chosen):
            if expert < EXPERTS:
                inner = gate(F.linear(x[token], up[expert], _bias(layer, "gate_up_proj", expert)))
                y = F.linear(inner, down[expert], _bias(layer, "down_proj", expert))
                out[token] += weights[token, place] * y
    return out


def _bias(layer: QuantizedExperts, key: str, expert: int) -> Tensor | None:
    biases = dict(layer.named_buffers())
    return biases[f"{key}_bias"][expert] if f"{key}_bias" in biases else None


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2)
    return F.silu(gate) * up


def _clamped(x: Tensor) -> Tensor:
    gate, up = x[::2].clamp(max=0.5), x[1::2].clamp(-0.5, 0.5)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    "format",
    ["fp8_e4m3fn/block:128x128", "int8/channel", "int4.awq/group:32", "mxfp4/group:32"],
)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_result_is_that_of_the_dense_experts(format: str, tokens: int) -> None:
    layer = QuantizedExperts(_tensors(format), format)
    x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, 2)
    indices = torch.randint(EXPERTS + 1, (tokens, 2))  # the last one means none
    prepare(layer)
    with torch.inference_mode():
        wanted = _mixture(layer, x, indices, weights, _swiglu)
        torch.testing.assert_close(layer(x, indices, weights), wanted)


def test_gpt_oss_form_with_biases_and_clamp() -> None:
    tensors = _tensors("mxfp4/group:32", bias=True)
    layer = QuantizedExperts(
        tensors, "mxfp4/group:32", interleaved=True, alpha=1.702, limit=0.5, top_k=2
    )
    x, weights, indices = torch.randn(5, HIDDEN), torch.rand(5, 2), torch.randint(4, (5, 2))
    wanted = _mixture(layer, x, indices, weights, _clamped)
    torch.testing.assert_close(layer(x, indices, weights), wanted)
    layer.to(torch.bfloat16)
    state = layer.state_dict()
    stored = {name: tensor for name, tensor in tensors.items() if "bias" not in name}
    assert set(state) == set(tensors)
    assert all(same_bits(state[name], tensor) for name, tensor in stored.items())
    assert state["down_proj_bias"].dtype is torch.bfloat16


def test_names_of_other_checkpoints_are_given_by_argument() -> None:
    format = "fp8_e4m3fn/block:128x128"
    usual = _tensors(format)
    tensors = {
        "gate_up_proj": usual["gate_up_proj_weight"],
        "gate_up_proj_scale_inv": usual["gate_up_proj_weight_scale"],
        "down_proj": usual["down_proj_weight"],
        "down_proj_scale_inv": usual["down_proj_weight_scale"],
    }
    layer = QuantizedExperts(
        tensors,
        format,
        up={"weight": "gate_up_proj", "scale": "gate_up_proj_scale_inv"},
        down={"weight": "down_proj", "scale": "down_proj_scale_inv"},
        input_format="fp8_e4m3fn/group:128",
    )
    assert set(layer.state_dict()) == set(tensors)
    x, weights, indices = torch.randn(5, HIDDEN), torch.rand(5, 2), torch.randint(4, (5, 2))
    exact = _mixture(layer, x, indices, weights, _swiglu)
    assert float((layer(x, indices, weights) - exact).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize("expert", [-1, EXPERTS + 1])
def test_expert_that_does_not_exist_is_named(expert: int) -> None:
    layer = QuantizedExperts(_tensors("int8/channel"), "int8/channel")
    indices = torch.tensor([[0, expert]])
    with pytest.raises(ValueError, match=f"expert {expert} was chosen for a token: there are 4"):
        layer(torch.randn(1, HIDDEN), indices, torch.ones(1, 2))


def test_prepared_layer_compiles_to_one_graph() -> None:
    layer = QuantizedExperts(_tensors("mxfp4/group:32"), "mxfp4/group:32")
    prepare(layer)
    x, weights, indices = torch.randn(5, HIDDEN), torch.rand(5, 2), torch.randint(4, (5, 2))
    torch.compiler.reset()
    with torch.inference_mode():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, indices, weights), layer(x, indices, weights))


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"other": torch.ones(1)}, {}, "other belong neither to up nor to down"),
        ({}, {"up": "w1_"}, "belong neither to up nor to down"),
        ({"down_proj_scales": torch.zeros(3, 64, 1).byte()}, {}, r"expected \(4, 64, 1\)"),
        ({"down_proj_bias": torch.zeros(4, 3)}, {}, r"expected floating \(4, 64\)"),
        ({}, {"gated": False}, r"expected down to be \[64, 64\]"),
    ],
)
def test_tensors_that_are_no_such_experts_are_refused(
    change: dict[str, Tensor], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedExperts(_tensors("mxfp4/group:32") | change, "mxfp4/group:32", **more)
