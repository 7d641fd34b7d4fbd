"""quantized_linear: x · Wᵀ + bias, where W is what a quantised checkpoint stores.

Without a format of activations, x is multiplied as it is (weight-only: W8A16, W4A16). With one, x
is quantised by `quantize` first, and the sums are of q · s of both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.codes import decode_to, named, out_features, unpack_words
from polysilicon.ops import dequantize, quantize
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.quantized_samples import WEIGHTS, problem_weight, weight_sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from polysilicon.records import Problem

#: What samples multiply with activations that are quantised: (weight, activation).
PAIRS: tuple[tuple[str, str], ...] = (
    ("int8/channel", "int8/token"),
    ("int8/tensor", "int8/token"),
    ("int8/channel", "int8/tensor"),
    ("fp8_e4m3fn/channel", "fp8_e4m3fn/token"),
    ("fp8_e4m3fn/tensor", "fp8_e4m3fn/tensor"),
    ("fp8_e4m3fn/block:128x128", "fp8_e4m3fn/group:128"),
    ("int4.compressed_tensors/channel", "int8/token"),
)


def reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    activation: str,
) -> Tensor:
    """Sums of products in float64 of what the codes mean."""
    wide = x.double()
    if activation:
        q, s = quantize.reference(x, input_scale, activation)
        wide = q * quantize.spread_scale(s, named(activation), x.shape[-1])
    dense = dequantize.reference(weight, scale, zeros, g_idx, format, x.shape[-1], x.dtype)
    y = torch.einsum("...k,nk->...n", wide, dense)
    return y if bias is None else y + bias.double()


def torch_kernel(
    x: Tensor,  # [..., K]
    weight: Tensor,  # as the format stores it
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,  # int32 [K], None where groups are runs of inputs
    bias: Tensor | None,  # [N]
    input_scale: Tensor | None,  # the static scale of the activation's granularity tensor
    format: str,
    activation: str,  # "" for none
) -> Tensor:  # [..., N]
    """The dense weight made in the call, then PyTorch's own linear.

    Weight-only in the dtype of `x`: bit for bit F.linear with `dequantize`'s result. Quantised
    activations are emulated: exact codes of both sides, multiplied and summed in float32.
    """
    stored, dtype = named(format), torch.float32 if activation else x.dtype
    dense = decode_to(dtype, stored, weight, scale, zeros, g_idx, x.shape[-1])
    if not activation:
        return F.linear(x, dense, bias)
    stored = named(activation)
    values = quantize.dequantized(*quantize.torch_kernel(x, input_scale, activation), stored)
    y = F.linear(values, dense, None if bias is None else bias.float())
    return y.to(x.dtype)


def quantized_linear_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    activation: str,
) -> Tensor:
    """Shape function of every kernel of this op."""
    return x.new_empty(*x.shape[:-1], out_features(named(format), weight))


def torch_int8_kernel(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    activation: str,
) -> Tensor:
    """int8 by int8 with int32 sums, so exact before the scales: `torch._int_mm`."""
    del zeros, g_idx, format
    q, s = quantize.torch_kernel(x, input_scale, activation)
    sums = torch._int_mm(q.view(-1, q.shape[-1]), weight.t())
    rows = s if s.numel() == 1 else s.view(-1, 1)
    y = sums.float() * rows * scale.float().reshape(-1)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def torch_w8a16_kernel(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    format: str,
    activation: str,
) -> Tensor:
    """bfloat16 by int8 as it is stored, a scale a row: `torch._weight_int8pack_mm`."""
    del zeros, g_idx, input_scale, format, activation
    if weight.dtype is torch.int32:
        # Words of compressed-tensors, where 128 is zero.
        weight = unpack_words(weight, 8).bitwise_xor(128).view(torch.int8)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = torch._weight_int8pack_mm(rows, weight, scale.reshape(-1))
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def activation_sample(
    source: Source, shape: tuple[int, ...], activation: str, magnitude: float = 1.0
) -> dict[str, Any]:
    """x, and a static scale where the activation's format has one."""
    x = source.normal(*shape, magnitude=magnitude)
    static = torch.tensor(magnitude * 0.02, device=x.device) if "/tensor" in activation else None
    return {"x": x, "input_scale": static, "activation": activation}


def in_order(arguments: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments in the schema's order: the first one is counted as tokens."""
    return {name: arguments[name] for name in names}


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def call(name: str, given: Mapping[str, Any], stored: Mapping[str, Any], bias: bool) -> Sample:
        size = out_features(named(stored["format"]), stored["weight"])
        added = source.normal(size) if bias else None
        kwargs = in_order({**given, **stored, "bias": added}, OP.arguments)
        return Sample(name=name, kwargs=kwargs)

    for index, (name, format, shape, act_order) in enumerate(WEIGHTS):
        stored = weight_sample(format, shape, device, act_order=act_order)
        given = activation_sample(source, (1 + index % 3, shape[-1]), "")
        yield call(name, given, stored, bool(index % 2))
    for format, activation in PAIRS:
        stored = weight_sample(format, (40, 256), device)
        for tokens in TOKENS:
            given = activation_sample(source, (tokens, 256), activation)
            yield call(f"{format} × {activation} tokens {tokens}", given, stored, tokens == 7)
        for magnitude in MAGNITUDES:
            given = activation_sample(source, (2, 3, 256), activation, magnitude)
            yield call(f"{format} × {activation} magnitude {magnitude}", given, stored, False)
    stored = weight_sample("int4.gptq/group:32", (24, 64), device)
    for tokens in TOKENS:
        given = activation_sample(source, (tokens, 64), "")
        yield call(f"tokens {tokens}", given, stored, True)
    for name, form in FORMS.items():
        given = activation_sample(source, (5, 64), "")
        yield call(name, {**given, "x": form(given["x"])}, stored, False)


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments of quantized_linear for `tokens` rows."""
    source = Source(dtype, device)
    stored = problem_weight(problem, device)
    shape = (tokens, int(problem.fact("in") or 1024))
    given = activation_sample(source, shape, str(problem.fact("activation") or ""))
    size = int(problem.fact("out") or 1024)
    bias = source.normal(size) if problem.fact("bias", False) else None
    return in_order({**given, **stored, "bias": bias}, OP.arguments)


OP = Op(
    name="quantized_linear",
    schema=(
        "(Tensor x, Tensor weight, Tensor scale, Tensor? zeros, Tensor? g_idx, Tensor? bias, "
        "Tensor? input_scale, str format, str activation) -> Tensor"
    ),
    keys=frozenset({"in", "out", "bias", "format", "activation", "act_order"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_problem_call,
    source="https://arxiv.org/abs/2211.10438",
)
