"""silu_and_mul: silu(first half) · second half, the gate of a SwiGLU MLP (arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """silu of the first half times the second half, in float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def torch_kernel(x: Tensor) -> Tensor:  # [..., 2 · width] → [..., width]
    """silu(x[..., :width]) · x[..., width:] in the dtype of `x`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated_samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Calls with `x` [..., 2 · width] alone; gelu_and_mul adds its argument."""
    source = Source(dtype, device)
    for tokens in TOKENS:
        yield Sample(name=f"tokens {tokens}", kwargs={"x": source.normal(tokens, 128)})
    for width in (1, 31, 1536):
        yield Sample(name=f"width {width}", kwargs={"x": source.normal(3, 2 * width)})
    for magnitude in MAGNITUDES:
        x = source.normal(2, 5, 62, magnitude=magnitude)
        yield Sample(name=f"magnitude {magnitude}", kwargs={"x": x})
    for name, form in FORMS.items():
        yield Sample(name=name, kwargs={"x": form(source.normal(5, 62))})


OP = Op(
    name="silu_and_mul",
    schema="(Tensor x) -> Tensor",
    keys=frozenset({"width"}),
    reference=reference,
    samples=gated_samples,
    inputs=problem_inputs.silu_and_mul,
    source="https://arxiv.org/abs/2002.05202",
)
