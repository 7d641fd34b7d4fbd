"""rms_norm_quant: an RMS norm whose result is quantised at once: rms_norm, then quantize.

The norm's result is rounded to the dtype of `x` before it is quantised, so that fusing the two
changes no bit of what a model computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon import formats
from polysilicon.ops import problem_inputs, quantize, rms_norm
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from polysilicon.records import Problem


def reference(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, format: str
) -> tuple[Tensor, Tensor]:
    """rms_norm in float64, rounded to the dtype of `x`, then quantize's definition."""
    normed = rms_norm.reference(x, weight, eps, offset)
    return quantize.reference(normed.to(x.dtype), None, format)


def torch_kernel(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float,
    format: str,  # a format of activations by token or group
) -> tuple[Tensor, Tensor]:  # codes [..., hidden], float32 [..., 1] or [..., groups]
    """The portable kernels of rms_norm and quantize, one after the other."""
    return quantize.torch_kernel(rms_norm.torch_kernel(x, weight, eps, offset), None, format)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def call(
        format: str, name: str, x: Tensor, weight: Tensor | None, offset: float = 0.0
    ) -> Sample:
        kwargs = {"x": x, "weight": weight, "eps": 1e-6, "offset": offset, "format": format}
        return Sample(name=f"{format} {name}", kwargs=kwargs)

    for format in quantize.FORMATS:
        weight = source.normal(256, magnitude=0.1, mean=1.0)
        for tokens in TOKENS:
            yield call(format, f"tokens {tokens}", source.normal(tokens, 256), weight)
        for hidden in (1, 31, 576):
            yield call(format, f"hidden {hidden}", source.normal(3, hidden), source.normal(hidden))
        for magnitude in MAGNITUDES:
            x = source.normal(2, 5, 256, magnitude=magnitude)
            yield call(format, f"magnitude {magnitude}", x, weight)
        for name, form in FORMS.items():
            yield call(format, name, form(source.normal(5, 256)), weight)
        yield call(format, "no weight", source.normal(3, 192), None)
        yield call(format, "offset 1", source.normal(3, 256), 0.1 * weight, 1.0)
        yield call(format, "zeros", 0 * source.normal(3, 256), weight)


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    arguments = problem_inputs.rms_norm(problem, tokens, dtype, device)
    return arguments | {"format": str(problem.fact("format") or formats.FP8_TOKEN)}


OP = Op(
    name="rms_norm_quant",
    schema="(Tensor x, Tensor? weight, float eps, float offset, str format) -> (Tensor, Tensor)",
    keys=frozenset({"hidden", "eps", "offset", "weight", "format"}),
    reference=reference,
    samples=_samples,
    reduction=lambda kwargs: int(kwargs["x"].shape[-1]),
    inputs=_problem_call,
    results=("format", "float32"),
    source="https://arxiv.org/abs/2211.10438",
)
