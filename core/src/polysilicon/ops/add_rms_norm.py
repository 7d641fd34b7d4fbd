"""add_rms_norm: residual add, then rms_norm; the pair between two blocks of a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.ops import problem_inputs, rms_norm
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual).

    The sum is rounded to the dtype of `x` before it is normalised: it is an output of its own,
    and the next block must see the very numbers that this norm saw.
    """
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm.reference(total, weight, eps, offset), total.double()


def torch_kernel(
    x: Tensor,  # [..., hidden]
    residual: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both in the dtype of `x`."""
    total = x + residual
    return rms_norm.torch_kernel(total, weight, eps, offset), total


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device, seed=1)
    for sample in rms_norm.OP.samples(dtype, device):
        x = sample.kwargs["x"]
        residual = source.normal(*x.shape)
        yield Sample(name=sample.name, kwargs={**sample.kwargs, "residual": residual})


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


OP = Op(
    name="add_rms_norm",
    schema=(
        "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0)"
        " -> (Tensor, Tensor)"
    ),
    keys=rms_norm.OP.keys,
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    results=("input", "input"),
    inputs=problem_inputs.add_rms_norm,
    source="https://arxiv.org/abs/1910.07467",
)
