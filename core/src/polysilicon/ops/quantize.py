"""quantize: an activation as codes and scales, by scales found in the call or by a given one.

The definition is of float32 steps, each rounded once, so that every kernel can give the same bits:
scale = amax / largest (1 where that is 0), q = the nearest code to clamp(x / scale), ties to even.
`largest` is 448 for e4m3fn, 240 for e4m3fnuz and 127 for int8. OCP's 8-bit formats are defined in
arXiv:2209.05433; scales by token and by group of 128 as in arXiv:2412.19437, 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon import formats
from polysilicon.codes import named
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.records import Format, Problem

#: Code → (least, largest) number that it takes.
LIMITS = {
    "fp8_e4m3fn": (-448.0, 448.0),
    "fp8_e4m3fnuz": (-240.0, 240.0),
    "int8": (-128.0, 127.0),
}
#: What the samples of the ops that quantise activations cover.
FORMATS = tuple(
    str(stored) for stored in (formats.FP8_TOKEN, formats.INT8_TOKEN, formats.FP8_GROUP)
)


def reference(x: Tensor, scale: Tensor | None, format: str) -> tuple[Tensor, Tensor]:
    """The definition in float64, the nearest code looked up in the list of all of them."""
    stored = named(format)
    width = x.shape[-1]
    size = formats.block_of(stored)[1] or width
    if scale is None:
        found = [part.double().abs().amax(-1) for part in torch.split(x, size, -1)]
        scale = (torch.stack(found, -1) / LIMITS[stored.logical][1]).float()
        scale = torch.where(scale == 0, 1.0, scale)
    scale = scale.float()
    spread = spread_scale(scale, stored, width)
    return _nearest(stored, (x.double() / spread.double()).float().double()), scale.double()


def spread_scale(scale: Tensor, stored: Format, width: int) -> Tensor:
    """A scale for each number of a row; one that serves all of them as it is."""
    if stored.granularity == "tensor":
        return scale.reshape(())
    return scale.repeat_interleave(formats.block_of(stored)[1] or width, -1)[..., :width]


def _nearest(stored: Format, numbers: Tensor) -> Tensor:
    """The nearest number that the format has; of two as near the one with an even code."""
    least, largest = LIMITS[stored.logical]
    if stored.logical == "int8":
        return numbers.round().clamp(least, largest)
    # Positive codes rise with their numbers; the last one or more are NaN.
    codes = torch.arange(128, dtype=torch.uint8, device=numbers.device)
    values = codes.view(getattr(torch, stored.dtype)).double()
    values = values[values.isfinite()]
    size = numbers.abs().clamp(max=largest)
    above = torch.searchsorted(values, size.contiguous()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    low, high = size - values[below], values[above] - size
    lower = (low < high) | ((low == high) & (below % 2 == 0))
    found = torch.where(lower, values[below], values[above])
    return torch.where(size.isnan(), size, found.copysign(numbers))


def torch_kernel(
    x: Tensor,  # [..., width]
    scale: Tensor | None,  # [] or [1], the static one of granularity tensor
    format: str,
) -> tuple[Tensor, Tensor]:  # [..., width], float32 [..., 1], [..., groups] or []
    """Codes and scales by the definition; the compiler makes two passes of it."""
    stored = named(format)
    groups = _grouped(x.float(), stored)
    if scale is None:
        found = groups.abs().amax(-1) / LIMITS[stored.logical][1]
        scale = torch.where(found == 0, 1.0, found)
        quotient = groups / scale[..., None]
    else:
        scale = scale.float().reshape(())
        quotient = groups / scale
    q = quotient.flatten(-2)[..., : x.shape[-1]].clamp(*LIMITS[stored.logical])
    if stored.logical == "int8":
        q = q.round()
    return q.to(getattr(torch, stored.dtype)).contiguous(), scale.contiguous()


def _grouped(x: Tensor, stored: Format) -> Tensor:
    """[..., width] → [..., groups, size]; a last group that is not full is filled up with zeros."""
    size = formats.block_of(stored)[1] or max(1, x.shape[-1])
    if x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
    return torch.unflatten(x, -1, (-1, size))


def dequantized(q: Tensor, scale: Tensor, stored: Format) -> Tensor:
    """q · scale in float32: what an activation is after being quantised."""
    if stored.granularity == "tensor":
        return q.float() * scale
    values = (_grouped(q.float(), stored) * scale[..., None]).flatten(-2)
    return values[..., : q.shape[-1]]


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def call(name: str, x: Tensor, format: str, scale: Tensor | None = None) -> Sample:
        return Sample(name=name, kwargs={"x": x, "scale": scale, "format": format})

    for format in (*FORMATS, "fp8_e4m3fnuz/token/float32"):
        for tokens in TOKENS:
            yield call(f"{format} tokens {tokens}", source.normal(tokens, 256), format)
        for width in (1, 31, 127, 300):
            yield call(f"{format} width {width}", source.normal(3, width), format)
        for magnitude in MAGNITUDES:
            x = source.normal(2, 5, 256, magnitude=magnitude)
            yield call(f"{format} magnitude {magnitude}", x, format)
        for name, form in FORMS.items():
            yield call(f"{format} {name}", form(source.normal(5, 192)), format)
        yield call(f"{format} zeros", 0 * source.normal(3, 128), format)
    static = torch.tensor(0.01, device=device)
    for format in ("fp8_e4m3fn/tensor/float32", "int8/tensor/float32"):
        x = source.normal(4, 40, magnitude=2.0)  # some beyond what the scale reaches
        yield call(f"{format} static", x, format, static)


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments of quantize for `tokens` rows."""
    stored = str(problem.fact("format") or formats.FP8_TOKEN)
    static = torch.tensor(0.02, device=device) if "/tensor" in stored else None
    x = Source(dtype, device).normal(tokens, int(problem.fact("hidden") or 1024))
    return {"x": x, "scale": static, "format": stored}


OP = Op(
    name="quantize",
    schema="(Tensor x, Tensor? scale, str format) -> (Tensor, Tensor)",
    keys=frozenset({"hidden", "format"}),
    reference=reference,
    samples=_samples,
    inputs=_problem_call,
    results=("format", "float32"),
    source="https://arxiv.org/abs/2209.05433",
)
