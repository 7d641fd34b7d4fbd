"""quantized_grouped_linear: rows sorted by expert, each expert's by its own quantised weight.

S rows of E experts: expert e's are offsets[e - 1]:offsets[e] (from 0 for the first). Rows past the
last offset belong to no expert: zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.codes import named, out_features
from polysilicon.ops import quantized_linear
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.quantized_linear import activation_sample, in_order
from polysilicon.ops.quantized_samples import problem_weight, weight_sample
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from polysilicon.records import Problem


def reference(
    x: Tensor,  # [S, K], sorted by expert
    weight: Tensor,  # as the format stores it, [E, ...]
    scale: Tensor,  # [E, ...]
    zeros: Tensor | None,  # [E, ...]
    g_idx: Tensor | None,  # int32 [K], one for all experts
    bias: Tensor | None,  # [E, N]
    input_scale: Tensor | None,
    offsets: Tensor,  # int32 [E], where each expert's rows end
    format: str,
    activation: str,
) -> Tensor:  # [S, N]
    """One expert after the other, in float64."""
    return _by_expert(
        quantized_linear.reference,
        x.new_zeros(x.shape[0], out_features(named(format), weight), dtype=torch.float64),
        (x, weight, scale, zeros, g_idx, bias, input_scale, format, activation),
        offsets,
    )


def torch_kernel(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    offsets: Tensor,
    format: str,
    activation: str,
) -> Tensor:
    """quantized_linear's kernel for every expert that has rows: no other weight is made dense."""
    return _by_expert(
        quantized_linear.torch_kernel,
        x.new_zeros(x.shape[0], out_features(named(format), weight)),
        (x, weight, scale, zeros, g_idx, bias, input_scale, format, activation),
        offsets,
    )


def _by_expert(
    product: Callable[..., Tensor], out: Tensor, arguments: tuple[Any, ...], offsets: Tensor
) -> Tensor:
    x, weight, scale, zeros, g_idx, bias, input_scale, format, activation = arguments
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            out[begin:end] = product(
                x[begin:end],
                weight[expert],
                scale[expert],
                None if zeros is None else zeros[expert],
                g_idx,
                None if bias is None else bias[expert],
                input_scale,
                format,
                activation,
            )
        begin = end
    return out


def quantized_grouped_linear_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    offsets: Tensor,
    format: str,
    activation: str,
) -> Tensor:
    """Shape function of every kernel of this op."""
    return x.new_empty(x.shape[0], out_features(named(format), weight))


#: (format, activation) of the samples.
_PAIRS = (
    ("mxfp4/group:32", ""),
    ("fp8_e4m3fn/block:128x128", "fp8_e4m3fn/group:128"),
    ("fp8_e4m3fn/tensor", "fp8_e4m3fn/tensor"),
    ("int8/channel", "int8/token"),
    ("int4.gptq/group:32", ""),
    ("int4.awq/group:64", ""),
    ("int4.compressed_tensors/group:32/bfloat16/zeros", ""),
)
#: Where experts' rows end, of how many: none, all of one, some without any, rows of nobody.
_SPLITS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((0, 0, 0), 0),
    ((0, 1, 1), 1),
    ((3, 3, 17), 17),
    ((2, 5, 9), 13),
)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for format, activation in _PAIRS:
        stored = weight_sample(format, (3, 40, 128), device)
        for index, (ends, rows) in enumerate(_SPLITS):
            given = activation_sample(source, (rows, 128), activation)
            offsets = torch.tensor(ends, dtype=torch.int32, device=device)
            given["x"][ends[-1] :] = float("nan")  # nobody's rows are not read
            bias = source.normal(3, 40) if index % 2 else None
            kwargs = {**given, **stored, "bias": bias, "offsets": offsets}
            name = f"{format} {activation} ends {ends} of {rows}"
            yield Sample(name=name, kwargs=in_order(kwargs, OP.arguments))


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["x"].shape[-1])


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments for `tokens` rows, spread evenly over the experts."""
    source, experts = Source(dtype, device), int(problem.fact("experts") or 8)
    stored = problem_weight(problem, device, (experts,))
    shape = (tokens, int(problem.fact("in") or 1024))
    given = activation_sample(source, shape, str(problem.fact("activation") or ""))
    size = int(problem.fact("out") or 1024)
    bias = source.normal(experts, size) if problem.fact("bias", False) else None
    ends = [tokens * (expert + 1) // experts for expert in range(experts)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    return in_order({**given, **stored, "bias": bias, "offsets": offsets}, OP.arguments)


OP = Op(
    name="quantized_grouped_linear",
    schema=(
        "(Tensor x, Tensor weight, Tensor scale, Tensor? zeros, Tensor? g_idx, Tensor? bias, "
        "Tensor? input_scale, Tensor offsets, str format, str activation) -> Tensor"
    ),
    keys=frozenset({"experts", "in", "out", "bias", "format", "activation", "act_order"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_problem_call,
    source="https://arxiv.org/abs/2211.15841",
)
