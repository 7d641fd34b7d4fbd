"""The small layers: results, problems, dtype moves, compilation, and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from polysilicon import ops
from polysilicon.layers.activation import Activation, GatedActivation
from polysilicon.layers.base import Layer
from polysilicon.layers.embedding import Embedding
from polysilicon.layers.linear import Linear
from polysilicon.layers.lm_head import LMHead
from polysilicon.layers.mlp import GatedMLP
from polysilicon.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(1)))


def mlp(kind: str = "silu") -> GatedMLP:
    gate, up, down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
    return GatedMLP(gate, up, down, kind)


LAYERS = {
    "rms_norm": lambda: RMSNorm(weight(8), 1e-6),
    "rms_norm without weight": lambda: RMSNorm(None, 1e-6, hidden=8),
    "gated_rms_norm": lambda: GatedRMSNorm(weight(8), 1e-6, group_size=4),
    "layer_norm": lambda: LayerNorm(weight(8), weight(8), 1e-6),
    "layer_norm of bias only": lambda: LayerNorm(None, weight(8), 1e-6),
    "activation": lambda: Activation("gelu_new"),
    "gated_activation": lambda: GatedActivation("relu2", width=4),
    "linear": lambda: Linear(weight(5, 8), weight(5)),
    "conv1d": lambda: Linear(weight(8, 5), weight(5), transposed=True),
    "lm_head": lambda: LMHead(weight(11, 8), None, 0.5, 30.0),
    "mlp": mlp,
}


def call(layer: Layer, x: Tensor) -> Tensor:
    return layer(x, x) if isinstance(layer, GatedRMSNorm) else layer(x)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_survives_casts_and_copies(name: str) -> None:
    layer = LAYERS[name]()
    with torch.no_grad():
        expected = call(layer, X)
        assert torch.equal(call(copy.deepcopy(layer), X), expected)
        assert torch.equal(call(pickle.loads(pickle.dumps(layer)), X), expected)
        narrow = layer.to(torch.bfloat16)
        torch.testing.assert_close(
            call(narrow, X.bfloat16()).float(), expected, rtol=0.05, atol=0.05
        )
    for module in narrow.modules():
        if isinstance(module, Layer):
            assert {p.dtype for p in module.problems().values()} <= {"bfloat16"}


@pytest.mark.parametrize("name", LAYERS)
def test_problems_state_only_declared_facts_and_slots_can_be_bound(name: str) -> None:
    for module in LAYERS[name]().modules():
        for slot, problem in module.problems().items() if isinstance(module, Layer) else ():
            assert set(problem.facts) <= ops.get(problem.op).keys
            assert callable(getattr(module, slot))
            module.bind_kernel(slot, print)
            assert getattr(module, slot) is print


def test_unknown_slot_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no op slot 'norm': one of rms_norm, add_rms_norm"):
        RMSNorm(weight(8), 1e-6).bind_kernel("norm", print)


def test_layers_keep_the_parameter_objects() -> None:
    w, b = weight(5, 8), weight(5)
    layer = Linear(w, b)
    assert layer.weight is w
    assert dict(layer.named_parameters()) == {"weight": w, "bias": b}
    assert list(RMSNorm(None, 1e-6, hidden=8).state_dict()) == []


def test_add_norm_returns_norm_and_sum() -> None:
    layer = RMSNorm(weight(8), 1e-6, offset=1.0)
    y, total = layer.forward_add(X, X)
    assert torch.equal(total, X + X)
    assert torch.equal(y, layer(X + X))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_gated_mlp_equals_its_formula_and_keeps_names(kind: str) -> None:
    layer = mlp(kind)
    with torch.no_grad():
        gate, up = layer.gate_proj(X), layer.up_proj(X)
        expected = layer.down_proj(Activation(kind)(gate) * up)
        torch.testing.assert_close(layer(X), expected)
    names = {
        f"{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")
    }
    assert set(layer.state_dict()) == names


def test_embedding_scales_and_shifts() -> None:
    table = weight(10, 4)
    ids = torch.tensor([[0, 3]])
    assert torch.equal(Embedding(table, 2.0, 2)(ids), table[ids + 2] * 2)


def test_tied_head_and_embedding_share_one_parameter() -> None:
    table = weight(10, 4)
    model = nn.ModuleDict({"embed": Embedding(table), "head": LMHead(table)}).to(torch.bfloat16)
    assert model["embed"].weight is model["head"].weight


ERRORS = {
    "eps is -1": lambda: RMSNorm(weight(8), -1.0),
    "without a weight, say the size": lambda: RMSNorm(None, 1e-6),
    "weight has shape .8, 2., expected one dimension": lambda: RMSNorm(weight(8, 2), 1e-6),
    "group_size 3 does not divide the last dim .8.": lambda: GatedRMSNorm(
        weight(8), 1e-6, group_size=3
    ),
    "bias has shape .7,., expected .8,.": lambda: LayerNorm(weight(8), weight(7), 1e-6),
    "activation 'gulu' is not known": lambda: Activation("gulu"),
    "weight has shape .8,., expected .out, in.": lambda: Linear(weight(8)),
    "bias has shape .8,., expected .5,.": lambda: Linear(weight(5, 8), weight(8)),
    "offset 9 lies outside the table of 4 rows": lambda: Embedding(weight(4, 8), offset=9),
    "softcap is nan": lambda: LMHead(weight(4, 8), softcap=float("nan")),
    "gate has 4 outputs, up 5": lambda: GatedMLP(
        nn.Linear(8, 4), nn.Linear(8, 5), nn.Linear(4, 8), "silu"
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_bad_arguments_raise_one_clear_error(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ERRORS[text]()


def test_integer_weights_are_refused_by_dtype() -> None:
    with pytest.raises(TypeError, match=r"must be a floating-point tensor, got torch.int8"):
        Linear(torch.zeros(4, 4, dtype=torch.int8))
