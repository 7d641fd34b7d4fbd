"""rms_norm: root-mean-square norm of the last dim (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) · (weight + offset) in float64; `offset` 1 is Gemma's form."""
    wide = x.double()
    normed = wide / ((wide**2).mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * (weight.double() + offset)


def torch_kernel(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """rms_norm with float32 sums (float64 for float64), rounded once to the dtype of `x`.

    One pass reads the squares and nothing wide is stored; small steps are in place, because on a
    CPU each further tensor of one token costs about as much as its arithmetic.
    """
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=wide)
    scale = norm.square().mul_(1 / max(1, x.shape[-1])).add_(eps).rsqrt_()
    return weighted(x * scale, weight, offset).to(x.dtype)


def weighted(normed: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    """normed · (weight + offset) in float32, in place; `normed` must be a fresh tensor."""
    if weight is None:
        return normed
    if offset == 1.0:
        # n + n·w: 1 + w in bfloat16 would lose the low bits of w, and a float copy costs a call.
        return torch.addcmul(normed, normed, weight)
    return normed.mul_(weight.float() + offset if offset else weight)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for tokens in TOKENS:
        x, weight = source.normal(tokens, 64), source.normal(64, magnitude=0.1, mean=1.0)
        yield Sample(name=f"tokens {tokens}", kwargs={"x": x, "weight": weight, "eps": 1e-6})
    for hidden in (1, 31, 576, 4099):
        x, weight = source.normal(3, hidden), source.normal(hidden)
        yield Sample(name=f"hidden {hidden}", kwargs={"x": x, "weight": weight, "eps": 1e-5})
    weight = source.normal(127)
    for magnitude in MAGNITUDES:
        x = source.normal(2, 5, 127, magnitude=magnitude)
        yield Sample(name=f"magnitude {magnitude}", kwargs={"x": x, "weight": weight, "eps": 1e-6})
    for name, form in FORMS.items():
        x = form(source.normal(5, 127))
        yield Sample(name=name, kwargs={"x": x, "weight": weight, "eps": 1e-6})
    x = source.normal(2, 3, 4, 127)
    yield Sample(name="no weight", kwargs={"x": x, "weight": None, "eps": 1e-6})
    yield Sample(
        name="offset 1", kwargs={"x": x, "weight": 0.1 * weight, "eps": 1e-6, "offset": 1.0}
    )
    yield Sample(name="zeros", kwargs={"x": 0 * x, "weight": weight, "eps": 1e-6})


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


OP = Op(
    name="rms_norm",
    schema="(Tensor x, Tensor? weight, float eps, float offset=0.0) -> Tensor",
    keys=frozenset({"hidden", "eps", "offset", "weight"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=problem_inputs.rms_norm,
    source="https://arxiv.org/abs/1910.07467",
)
