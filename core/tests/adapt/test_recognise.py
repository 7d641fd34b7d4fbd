"""Modules are recognised by what they compute: the classes here have no telling names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polysilicon.adapt.activations import may_be_activation, recognise_activation
from polysilicon.adapt.linears import recognise_embedding, recognise_linear
from polysilicon.adapt.norms import recognise_norm
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.recording import ModuleCall
from polysilicon.adapt.rotary import recognise_rotary
from polysilicon.adapt.structure import Candidate


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def candidate(module: nn.Module, *args, dtype: torch.dtype = torch.float32) -> Candidate:
    recorded = ModuleCall(args, {}, module(*args)) if args else None
    return Candidate("somewhere", module.eval(), recorded, dtype)


class A(nn.Module):
    """RMS with one plus the weight."""

    def __init__(self, flavour: str, small: float = 1e-5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32) * 0.3)
        self.b = nn.Parameter(torch.randn(32)) if flavour == "layer" else None
        self.flavour, self.small = flavour, small

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flavour == "layer":
            return F.layer_norm(x, (32,), self.w, self.b, self.small)
        shift = 1.0 if self.flavour == "shifted" else 0.0
        power = x.abs() if self.flavour == "absolute" else x.pow(2)
        return x * torch.rsqrt(power.mean(-1, keepdim=True) + self.small) * (self.w + shift)


class B(nn.Module):
    """RMS in groups of eight, with a gate."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.w, self.group, self.small = nn.Parameter(torch.randn(32)), 8, 1e-5
        self.before = before

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x = x if self.before else x * F.silu(z)
        parts = x.view(*x.shape[:-1], 4, 8)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.small)
        y = parts.reshape(x.shape) * self.w
        return y * F.silu(z) if self.before else y


class C(nn.Module):
    """A scaled table."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(50, 8)), factor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids] * self.factor


class D(nn.Module):
    """x · weight + bias with the weight stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class E(nn.Module):
    """Angles of positions; a hidden twist makes long positions another function."""

    def __init__(self, twist: bool) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 500 ** (torch.arange(4) / 4))
        self.max_position_embeddings, self.twist = 64, twist

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angle = position_ids[..., None].float() * self.inv_freq
        if self.twist and position_ids.max() >= 64:
            angle = angle / 2
        angle = angle.repeat_interleave(2, -1)
        return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("flavour", "layer", "offset"),
    [("plain", "RMSNorm", 0.0), ("shifted", "RMSNorm", 1.0), ("layer", "LayerNorm", 0.0)],
)
@pytest.mark.parametrize("small", [1e-5, 1e-6])
def test_norms_by_formula(flavour, layer, offset, small):
    found, error = recognise_norm(candidate(A(flavour, small)))
    assert (type(found).__name__, found.offset, found.eps) == (layer, offset, small)
    assert error < 1e-6


def test_a_norm_of_another_formula_stays():
    with pytest.raises(Unverified, match="results differ by"):
        recognise_norm(candidate(A("absolute")))


@pytest.mark.parametrize("before", [False, True])
def test_gated_norms_by_order_and_group(before):
    x = torch.randn(2, 3, 32)
    found, _ = recognise_norm(candidate(B(before), x, x.flip(0)))
    assert (found.group_size, found.norm_before_gate) == (8, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "kind"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU(), "silu"), (nn.Tanh(), "tanh")],
)
def test_activations_are_told_apart(module, kind, dtype):
    found, _ = recognise_activation(candidate(module, dtype=dtype))
    assert found.kind == kind


@pytest.mark.parametrize("module", [nn.Softmax(-1), nn.Identity(), nn.Dropout()])
def test_what_is_not_elementwise_or_does_nothing_is_no_activation(module):
    assert not may_be_activation(candidate(module))


def test_tables_with_a_scale():
    found, error = recognise_embedding(candidate(C(3.5), torch.arange(4)[None]))
    assert found.scale == 3.5
    assert error == 0.0


def test_a_square_weight_stored_the_other_way_round_is_told_apart():
    assert recognise_linear(candidate(D()))[0].transposed
    assert not recognise_linear(candidate(nn.Linear(8, 8)))[0].transposed


def test_rotary_is_proved_past_the_thresholds():
    x, positions = torch.zeros(1, 3, 8), torch.arange(3)[None]
    found, _ = recognise_rotary(candidate(E(twist=False), x, positions))
    assert found.output == "repeated"
    with pytest.raises(Unverified):
        recognise_rotary(candidate(E(twist=True), x, positions))
