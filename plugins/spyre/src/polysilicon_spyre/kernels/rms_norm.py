"""rms_norm on stick-tiled memory, as the simulator runs it: rows over cores, hidden in sticks.

Padding of what is packed here holds NaN: a result that has none proves that no padding was taken
for data, in the mean of the squares above all. Sums are float32, rounded once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from polysilicon_spyre.division import divide_rows, rows_per_pass
from polysilicon_spyre.formats import dtype_name
from polysilicon_spyre.layout import layout_of, wide_vector

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """x / rms(x) · (weight + offset)."""
    hidden = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), hidden)
    stick = layout_of((1, hidden), dtype_name(x)).elems_per_stick
    tiles = -(-hidden // stick)
    scale = None if weight is None else wide_vector(weight, tiles, stick) + offset
    passes = torch.split(rows, rows_per_pass(tiles, tiles))
    return torch.cat([_one_pass(part, scale, eps) for part in passes]).view(x.shape)


def fake(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Shape and dtype of the result."""
    del weight, eps, offset
    return x.new_empty(x.shape)


def _one_pass(rows: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """[rows, hidden] → the same shape, for as many rows as the span limit lets one program take."""
    count, hidden = rows.shape
    if count == 0:
        return rows.new_empty(rows.shape)
    layout = layout_of((count, hidden), dtype_name(rows))
    image = layout.pack(rows, fill=math.nan)  # [hidden/stick, rows, stick]
    beyond = layout.padding_mask(rows.device)[:, None] if layout.padding_bytes else None
    result = torch.full_like(image, math.nan)
    for part in divide_rows(count):
        own = image[:, part].float()
        squares = own.square()
        if beyond is not None:
            squares = squares.masked_fill(beyond, 0.0)
        # One value a row: on the card a sparse tensor, one element in each stick.
        mean = squares.sum((0, 2)) / hidden
        normed = own * torch.rsqrt(mean + eps)[:, None]
        result[:, part] = normed if scale is None else normed * scale[:, None]
    return layout.unpack(result)
