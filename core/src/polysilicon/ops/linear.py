"""linear: x · weightᵀ + bias."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


#: Groups of weight rows in the batched product: more than the cores of a usual machine.
_ROW_GROUPS = 32


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of products in float64."""
    y = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return y if bias is None else y + bias.double()


def torch_kernel(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Tensor:
    """x · weightᵀ + bias by PyTorch's own linear."""
    return F.linear(x, weight, bias)


def torch_skinny_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for one to four tokens on a CPU: groups of weight rows times xᵀ.

    PyTorch hands one token to a matrix-vector routine that runs on one core, and few tokens to a
    matrix product that runs at a quarter of the memory's speed. A batched product over groups of
    rows of the weight reads it with all cores and needs no padding.
    """
    tokens, out = x.numel() // max(1, x.shape[-1]), weight.shape[0]
    groups = math.gcd(out, _ROW_GROUPS)
    if groups == 1:  # an odd number of rows, e.g. a vocabulary of 49,155
        y = torch.mm(weight, _two_rows(x.reshape(tokens, x.shape[-1])).t())[:, :tokens]
    else:
        columns = x.reshape(tokens, x.shape[-1]).t().expand(groups, -1, -1)
        y = torch.bmm(weight.view(groups, out // groups, -1), columns).view(out, tokens)
    return _as_rows(y, x, bias)


def _two_rows(rows: Tensor) -> Tensor:
    """One row is doubled: a product with a single column would run on one core."""
    return torch.cat((rows, rows)) if rows.shape[0] == 1 else rows


def _as_rows(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """[out, tokens] → [..., out], the bias added; for one token this copies nothing."""
    rows = y.t().contiguous()
    if bias is not None:
        rows = rows + bias
    return rows.view(*x.shape[:-1], y.shape[0])


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for tokens in TOKENS:
        kwargs: dict[str, Tensor | None] = {
            "x": source.normal(tokens, 48),
            "weight": source.normal(33, 48, magnitude=0.2),
            "bias": source.normal(33),
        }
        yield Sample(name=f"tokens {tokens}", kwargs=kwargs)
    for out, width in ((1, 1), (1, 64), (31, 1), (64, 4099), (257, 127)):
        x, weight = source.normal(1, 3, width), source.normal(out, width, magnitude=0.1)
        yield Sample(name=f"out {out} in {width}", kwargs={"x": x, "weight": weight, "bias": None})
    weight = source.normal(40, 32, magnitude=0.2)
    for magnitude in MAGNITUDES:
        x = source.normal(2, 5, 32, magnitude=magnitude)
        kwargs = {"x": x, "weight": weight, "bias": None}
        yield Sample(name=f"magnitude {magnitude}", kwargs=kwargs)
    for name, form in FORMS.items():
        x, bias = form(source.normal(5, 32)), source.normal(40)
        yield Sample(name=name, kwargs={"x": x, "weight": weight, "bias": bias})
    x, rows = source.normal(4, 32), source.normal(64, 32, magnitude=0.2)
    yield Sample(name="weight slice", kwargs={"x": x, "weight": rows[8:48], "bias": None})
    columns = source.normal(32, 40, magnitude=0.2).t()
    yield Sample(name="weight transposed", kwargs={"x": x, "weight": columns, "bias": None})


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


OP = Op(
    name="linear",
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    keys=frozenset({"in", "out", "bias"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=problem_inputs.linear,
    roles={"weight": "linear_weight"},
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.linear.html",
)
