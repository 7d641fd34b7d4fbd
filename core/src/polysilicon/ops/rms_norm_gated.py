"""rms_norm_gated: rms_norm with a SiLU gate, in groups (Mamba2, arXiv:2405.21060, section 8.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.rms_norm import weighted
from polysilicon.ops.samples import FORMS, MAGNITUDES, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    norm_before_gate: bool = False,
    group_size: int = 0,
) -> Tensor:
    """rms_norm in groups of `group_size` channels, times silu(gate) before or after, in float64."""
    wide, opened = x.double(), gate.double()
    opened = opened / (1 + (-opened).exp())
    if not norm_before_gate:
        wide = wide * opened
    groups = _grouped(wide, group_size)
    normed = (groups / ((groups**2).mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    if weight is not None:
        normed = normed * (weight.double() + offset)
    return normed * opened if norm_before_gate else normed


def _grouped(x: Tensor, group_size: int) -> Tensor:
    """[..., hidden] → [..., groups, group]; a group size of 0 means one group."""
    size = group_size or x.shape[-1]
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def torch_kernel(
    x: Tensor,  # [..., hidden]
    gate: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
    norm_before_gate: bool = False,
    group_size: int = 0,
) -> Tensor:
    """rms_norm of groups of `group_size` channels (0: all), gated, in the dtype of `x`."""
    opened = F.silu(gate.float())
    wide = x.float() if norm_before_gate else opened.mul_(x)
    groups = _grouped(wide, group_size)
    norm = torch.linalg.vector_norm(groups, 2, -1, True)
    scale = norm.square().mul_(1 / max(1, groups.shape[-1])).add_(eps).rsqrt_()
    normed = weighted((groups * scale).flatten(-2), weight, offset)
    return (normed.mul_(opened) if norm_before_gate else normed).to(x.dtype)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    weight = source.normal(96)
    for before in (False, True):
        for tokens in (0, 1, 7, 17):
            for group in (0, 1, 32):
                kwargs = {
                    "x": source.normal(tokens, 96),
                    "gate": source.normal(tokens, 96),
                    "weight": weight,
                    "eps": 1e-5,
                    "norm_before_gate": before,
                    "group_size": group,
                }
                yield Sample(name=f"tokens {tokens} group {group} before {before}", kwargs=kwargs)
    for magnitude in MAGNITUDES:
        x, gate = source.normal(3, 96, magnitude=magnitude), source.normal(3, 96)
        yield Sample(
            name=f"magnitude {magnitude}",
            kwargs={"x": x, "gate": gate, "weight": None, "eps": 1e-6},
        )
    for name, form in FORMS.items():
        x, gate = form(source.normal(5, 96)), form(source.normal(5, 96))
        kwargs = {"x": x, "gate": gate, "weight": weight, "eps": 1e-6, "offset": 1.0}
        yield Sample(name=name, kwargs=kwargs)


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


OP = Op(
    name="rms_norm_gated",
    schema=(
        "(Tensor x, Tensor gate, Tensor? weight, float eps, float offset=0.0,"
        " bool norm_before_gate=False, int group_size=0) -> Tensor"
    ),
    keys=frozenset({"hidden", "eps", "offset", "weight", "norm_before_gate", "group_size"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=problem_inputs.rms_norm_gated,
    source="https://arxiv.org/abs/2405.21060",
)
