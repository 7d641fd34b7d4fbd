"""layer_norm: normalisation of the last dim to mean 0, variance 1 (Ba et al., arXiv:1607.06450)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0
) -> Tensor:
    """(x - mean) / sqrt(var + eps) · (weight + offset) + bias in float64."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        normed = normed * (weight.double() + offset)
    return normed if bias is None else normed + bias.double()


def torch_kernel(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    bias: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """layer_norm in the dtype of `x`; PyTorch's own kernel sums in float32."""
    if weight is not None and offset:
        # The shifted weight stays in float32: 1 + w in bfloat16 would lose the low bits of w.
        wide_bias = None if bias is None else bias.float()
        shifted = weight.float() + offset
        return F.layer_norm(x.float(), shifted.shape, shifted, wide_bias, eps).to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for tokens in TOKENS:
        x, weight, bias = source.normal(tokens, 64), source.normal(64), source.normal(64)
        kwargs = {"x": x, "weight": weight, "bias": bias, "eps": 1e-5}
        yield Sample(name=f"tokens {tokens}", kwargs=kwargs)
    # Not 1: the result would be the rounding error of x - mean, over nothing.
    for hidden in (2, 31, 576, 4099):
        x, weight = source.normal(3, hidden), source.normal(hidden)
        kwargs = {"x": x, "weight": weight, "bias": None, "eps": 1e-5}
        yield Sample(name=f"hidden {hidden}", kwargs=kwargs)
    weight, bias = source.normal(127), source.normal(127)
    for magnitude in MAGNITUDES:
        x = source.normal(2, 5, 127, magnitude=magnitude)
        kwargs = {"x": x, "weight": weight, "bias": bias, "eps": 1e-5}
        yield Sample(name=f"magnitude {magnitude}", kwargs=kwargs)
    for name, form in FORMS.items():
        x = form(source.normal(5, 127))
        yield Sample(name=name, kwargs={"x": x, "weight": weight, "bias": bias, "eps": 1e-5})
    x = source.normal(2, 3, 127, mean=3.0)
    yield Sample(name="no weight", kwargs={"x": x, "weight": None, "bias": None, "eps": 1e-5})
    kwargs = {"x": x, "weight": 0.1 * weight, "bias": bias, "eps": 1e-5, "offset": 1.0}
    yield Sample(name="offset 1", kwargs=kwargs)


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


OP = Op(
    name="layer_norm",
    schema="(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset=0.0) -> Tensor",
    keys=frozenset({"hidden", "eps", "offset", "weight", "bias"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=problem_inputs.layer_norm,
    source="https://arxiv.org/abs/1607.06450",
)
