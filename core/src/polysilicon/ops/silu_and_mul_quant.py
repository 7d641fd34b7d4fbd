"""silu_and_mul_quant: the gate of a SwiGLU MLP, quantised at once: silu_and_mul, then quantize.

The gate's result is rounded to the dtype of `x` before it is quantised, as in rms_norm_quant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon import formats
from polysilicon.ops import problem_inputs, quantize, silu_and_mul
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from polysilicon.records import Problem


def reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """silu_and_mul in float64, rounded to the dtype of `x`, then quantize's definition."""
    return quantize.reference(silu_and_mul.reference(x).to(x.dtype), None, format)


def torch_kernel(
    x: Tensor,  # [..., 2 · width]
    format: str,  # a format of activations by token or group
) -> tuple[Tensor, Tensor]:  # codes [..., width], float32 [..., 1] or [..., groups]
    """The portable kernels of silu_and_mul and quantize, one after the other."""
    return quantize.torch_kernel(silu_and_mul.torch_kernel(x), None, format)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def call(format: str, name: str, x: Tensor) -> Sample:
        return Sample(name=f"{format} {name}", kwargs={"x": x, "format": format})

    for format in quantize.FORMATS:
        for tokens in TOKENS:
            yield call(format, f"tokens {tokens}", source.normal(tokens, 512))
        for width in (1, 31, 576):
            yield call(format, f"width {width}", source.normal(3, 2 * width))
        for magnitude in MAGNITUDES:
            yield call(
                format, f"magnitude {magnitude}", source.normal(2, 5, 512, magnitude=magnitude)
            )
        for name, form in FORMS.items():
            yield call(format, name, form(source.normal(5, 512)))


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    arguments = problem_inputs.silu_and_mul(problem, tokens, dtype, device)
    return arguments | {"format": str(problem.fact("format") or formats.FP8_TOKEN)}


OP = Op(
    name="silu_and_mul_quant",
    schema="(Tensor x, str format) -> (Tensor, Tensor)",
    keys=frozenset({"width", "format"}),
    reference=reference,
    samples=_samples,
    inputs=_problem_call,
    results=("format", "float32"),
    source="https://arxiv.org/abs/2211.10438",
)
