"""dequantize: the dense weight [N, K] of what a quantised checkpoint stores.

Defined in float32 steps (polysilicon.formats), then rounded once to the wanted dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon import formats
from polysilicon.codes import decode, named
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.quantized_samples import WEIGHTS, weight_sample

if TYPE_CHECKING:
    from collections.abc import Iterator


def reference(
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    format: str,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """The definition, weight by weight, from the bits where they lie; float32 steps."""
    del dtype  # the reference is not rounded
    stored = named(format)
    if weight.dim() > (3 if stored.logical == "mxfp4" else 2):
        parts = [
            reference(
                w, s, None if zeros is None else zeros[i], g_idx, format, in_features, w.dtype
            )
            for i, (w, s) in enumerate(zip(weight, scale, strict=True))
        ]
        return torch.stack(parts)
    rows, bits = _rows(weight, stored.packing), formats.code_of(stored).bits
    n = torch.arange(rows, device=weight.device)[:, None].expand(rows, in_features)
    k = torch.arange(in_features, device=weight.device)[None].expand(rows, in_features)
    high, wide = formats.block_of(stored)
    group = k // wide if wide else 0 * k
    if g_idx is not None:
        group = g_idx.long()[k]
    if stored.logical == "mxfp4":
        octet = weight[n, k // 32, k % 32 // 2].int()
        code = torch.where(k % 2 == 0, octet % 16, octet // 16)
        exponent, mantissa, sign = code // 2 % 4, code % 2, 1 - code // 8 * 2
        # e2m1: exponent bias 1, no infinities; exponent 0 is subnormal.
        size = torch.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0**exponent / 2)
        return sign * size.double() * 2.0 ** (scale[n, group].double() - 127)
    per_word = 32 // bits
    offset: Tensor | float = 0.0
    if stored.packing == "awq":
        place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=n.device)[n % 8]
        code = _bits(weight[k, n // 8], place, 4)
        assert zeros is not None
        offset = _bits(zeros[group, n // 8], place, 4)
    elif stored.packing.startswith("gptq"):
        code = _bits(weight[k // per_word, n], k % per_word, bits)
        assert zeros is not None
        offset = _bits(zeros[group, n // per_word], n % per_word, bits)
        offset = offset + (stored.packing == "gptq")
    elif stored.packing:
        code = _bits(weight[n, k // per_word], k % per_word, bits)
        offset = 2.0 ** (bits - 1)
        if zeros is not None:
            offset = _bits(zeros[n // per_word, group], n % per_word, bits)
    else:
        code = weight.double()
    if stored.packing.startswith("gptq") or stored.packing == "awq":
        factor = scale[group, n]
    elif stored.granularity == "tensor":
        factor = scale.reshape(()).expand(rows, in_features)
    else:
        factor = scale.reshape(-(-rows // high), -(-in_features // wide) if wide else 1)[
            n // high, group
        ]
    return ((code - offset).float() * factor.float()).double()


def _rows(weight: Tensor, packing: str) -> int:
    if packing == "awq":
        return 8 * weight.shape[1]
    return weight.shape[1] if packing.startswith("gptq") else weight.shape[0]


def _bits(words: Tensor, place: Tensor, bits: int) -> Tensor:
    """The code at a place of each word, by division: no shifts, no signs."""
    unsigned = words.long() % (1 << 32)
    return (unsigned // (1 << bits) ** place % (1 << bits)).double()


def torch_kernel(
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    format: str,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:  # [..., N, K]
    """(q - z) · s in float32, rounded to `dtype`."""
    return decode(named(format), weight, scale, zeros, g_idx, in_features).to(dtype).contiguous()


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    for name, format, shape, act_order in WEIGHTS:
        arguments = weight_sample(format, shape, device, act_order=act_order)
        kwargs = {**arguments, "in_features": shape[-1], "dtype": dtype}
        yield Sample(name=name, kwargs=kwargs)
    for format in ("int4.awq/group:32", "mxfp4/group:32", "fp8_e4m3fn/block:128x128"):
        arguments = weight_sample(format, (3, 160, 64), device)
        kwargs = {**arguments, "in_features": 64, "dtype": dtype}
        yield Sample(name=f"{format} of 3 experts", kwargs=kwargs)


OP = Op(
    name="dequantize",
    schema=(
        "(Tensor weight, Tensor scale, Tensor? zeros, Tensor? g_idx, str format, int in_features, "
        "ScalarType dtype) -> Tensor"
    ),
    keys=frozenset({"in", "out", "format", "act_order"}),
    reference=reference,
    samples=_samples,
    tokens=len,
    source="https://arxiv.org/abs/2210.17323",
)
