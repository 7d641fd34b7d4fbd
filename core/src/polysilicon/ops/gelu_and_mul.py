"""gelu_and_mul: gelu(first half) · second half, the gate of a GeGLU MLP (arXiv:2002.05202)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.silu_and_mul import gated_samples

if TYPE_CHECKING:
    from collections.abc import Iterator


def reference(x: Tensor, approximate: str) -> Tensor:
    """gelu of the first half, `tanh` approximation or exact (`none`), times the second half."""
    gate, up = x.double().chunk(2, dim=-1)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + inner.tanh()) / 2 * up
    return gate * torch.erfc(-gate / math.sqrt(2)) / 2 * up


def torch_kernel(x: Tensor, approximate: str) -> Tensor:  # [..., 2 · width] → [..., width]
    """gelu(x[..., :width]) · x[..., width:] in the dtype of `x`."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    for approximate in ("tanh", "none"):
        for sample in gated_samples(dtype, device):
            kwargs = {**sample.kwargs, "approximate": approximate}
            yield Sample(name=f"{approximate} {sample.name}", kwargs=kwargs)


OP = Op(
    name="gelu_and_mul",
    schema="(Tensor x, str approximate) -> Tensor",
    keys=frozenset({"width", "approximate"}),
    reference=reference,
    samples=_samples,
    inputs=problem_inputs.gelu_and_mul,
    source="https://arxiv.org/abs/2002.05202",
)
