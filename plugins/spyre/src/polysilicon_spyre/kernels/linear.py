"""linear on stick-tiled memory, as the simulator runs it: no relayout but that of x and y.

The weight comes in sticks along its outputs; x is packed into sticks along its inputs, the result
is written in sticks along its outputs, and unpacked. Each core of the card computes the slice of
the result that `division` gives it, from the slices of the operands that it reads. Padding of
what is packed here holds NaN: a result that has none proves that no padding was taken for data.
Products and sums are float32, rounded once.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from polysilicon_spyre.division import divide, rows_per_pass
from polysilicon_spyre.formats import dtype_name
from polysilicon_spyre.layout import layout_of, wide_vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon_spyre.division import Division


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out/stick, in, stick]
    bias: Tensor | None,  # [out]
    *,
    weight_shape: Sequence[int],  # out, in
) -> Tensor:
    """x · weightᵀ + bias → [..., out]."""
    out, depth = weight_shape
    lead = x.shape[:-1]
    rows = x.reshape(math.prod(lead), depth)
    wide_bias = None if bias is None else wide_vector(bias, weight.shape[0], weight.shape[-1])
    step = rows_per_pass(weight.shape[0], -(-depth // weight.shape[-1]))
    parts = [_one_pass(part, weight, wide_bias, out) for part in torch.split(rows, step)]
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y.view(*lead, out)


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, *, weight_shape: Sequence[int]) -> Tensor:
    """Shape and dtype of the result."""
    del weight, bias
    return x.new_empty((*x.shape[:-1], weight_shape[0]))


def _one_pass(rows: Tensor, weight: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """[rows, in] → [rows, out], for as many rows as the span limit lets one program take."""
    count, depth = rows.shape
    if count == 0:
        return rows.new_empty((0, out))
    image = layout_of((count, depth), dtype_name(rows)).pack(rows, fill=math.nan)
    division = divide(count, weight.shape[0], image.shape[0], depth)
    product = _on_cores(division, image, _padded_depth(weight, image.shape[0]), bias, depth)
    return layout_of((count, out), dtype_name(rows)).unpack(product)


def _on_cores(
    division: Division, x: Tensor, weight: Tensor, bias: Tensor | None, depth: int
) -> Tensor:
    """The result's image [out/stick, rows, stick]: each core's slice from what that core reads.

    The sticks of the result are the batch of one product: cores that differ in them alone run
    together, each on its own sticks. Cores that differ in rows or inputs run one after the other.
    """
    stick = x.shape[-1]
    held = [
        weight[:, part.start * stick : part.stop * stick].float() for part in division.depth_parts
    ]
    result = x.new_full((division.columns, division.rows, stick), math.nan)
    for rows in division.row_parts:
        sums = [
            torch.bmm(_read(x, rows, part, depth).expand(division.columns, -1, -1), own)
            for part, own in zip(division.depth_parts, held, strict=True)
        ]
        if bias is not None:
            sums[0] += bias[:, None]
        # Cores that cut the sum add up what they have, over the ring.
        result[:, rows] = functools.reduce(torch.add, sums)
    return result


def _read(x: Tensor, rows: slice, part: slice, depth: int) -> Tensor:
    """What one core's array takes of x [in/stick, rows, stick]: [rows, in], zero beyond `depth`."""
    stick = x.shape[-1]
    read = x[part, rows].transpose(0, 1).flatten(1).float()
    if part.stop * stick <= depth:
        return read
    beyond = layout_of((depth,), dtype_name(x)).padding_mask(x.device)[part].flatten()
    return read.masked_fill(beyond, 0.0)  # the hardware masks x; NaN times zero would stay NaN


def _padded_depth(weight: Tensor, tiles: int) -> Tensor:
    """The weight with whole sticks of inputs: zeros and a copy, as the compiler inserts them."""
    columns, depth, stick = weight.shape
    if depth == tiles * stick:
        return weight
    padded = weight.new_zeros((columns, tiles * stick, stick))
    padded[:, :depth] = weight
    return padded
