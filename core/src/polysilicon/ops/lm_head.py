"""lm_head: logits from hidden states, scaled and soft-capped (Gemma 2, arXiv:2408.00118, 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.ops import linear, problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """softcap · tanh(scale · (x · weightᵀ + bias) / softcap) in float64; softcap 0 means none."""
    logits = linear.reference(x, weight, bias) * scale
    return softcap * (logits / softcap).tanh() if softcap else logits


def torch_kernel(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocabulary, hidden]
    bias: Tensor | None,  # [vocabulary]
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Logits [..., vocabulary] in the dtype of `x`."""
    return finish(linear.torch_kernel(x, weight, bias), scale, softcap)


def torch_skinny_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """The same for one to four tokens on a CPU; see linear."""
    return finish(linear.torch_skinny_kernel(x, weight, bias), scale, softcap)


def finish(logits: Tensor, scale: float, softcap: float) -> Tensor:
    """Scaled, then soft-capped logits; shared by every kernel of this op."""
    if softcap:
        return logits.mul(scale / softcap).tanh_().mul_(softcap)
    return logits if scale == 1.0 else logits * scale


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    yield from linear.OP.samples(dtype, device)
    source = Source(dtype, device)
    for scale, softcap in ((0.125, 0.0), (1.0, 30.0), (4.0, 5.0)):
        x, weight = source.normal(3, 64, magnitude=2.0), source.normal(101, 64)
        kwargs = {"x": x, "weight": weight, "bias": None, "scale": scale, "softcap": softcap}
        yield Sample(name=f"scale {scale} softcap {softcap}", kwargs=kwargs)


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


OP = Op(
    name="lm_head",
    schema=(
        "(Tensor x, Tensor weight, Tensor? bias, float scale=1.0, float softcap=0.0) -> Tensor"
    ),
    keys=frozenset({"vocabulary", "hidden", "bias", "scale", "softcap"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=problem_inputs.lm_head,
    source="https://arxiv.org/abs/2408.00118",
)
