"""Dense weights as the tensors that a quantised checkpoint stores, by rounding to the nearest.

For tests, samples and conversions: no calibration. `polysilicon.codes` is the way back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon import formats
from polysilicon.codes import pack_weight, pack_zeros

if TYPE_CHECKING:
    from polysilicon.records import Format

#: e2m1's numbers: two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The largest number of a code that is a number by itself.
_LARGEST = {"fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0, "int8": 127.0}


def encode(stored: Format, dense: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """Argument of the ops → the tensor that a checkpoint of this format stores for it.

    Args:
        stored: the format.
        dense: [..., N, K], floating.
        g_idx: int32 [K], the group of each input where groups aren't runs of inputs (act-order).

    Raises:
        ValueError: K isn't a multiple of the group, or N or K doesn't fill the words.
    """
    dense = dense.float()
    _check_sizes(stored, dense)
    if stored.logical == "mxfp4":
        return _mxfp4(stored, dense)
    if stored.packing:
        return _words(stored, dense, g_idx)
    return _plain(stored, dense)


def _check_sizes(stored: Format, dense: Tensor) -> None:
    rows, columns = dense.shape[-2:]
    high, wide = formats.block_of(stored)
    if high == 1 and wide and columns % wide:
        raise ValueError(f"{stored}: {columns} inputs are not a multiple of the group {wide}")
    per_word = 32 // formats.code_of(stored).bits
    filled = {
        "gptq": (per_word, per_word),
        "gptq_v2": (per_word, per_word),
        "awq": (8, 1),
    }.get(stored.packing, (1, 1))
    if rows % filled[0] or columns % filled[1]:
        raise ValueError(
            f"{stored}: a weight [{rows}, {columns}] doesn't fill its words: expected out to be a "
            f"multiple of {filled[0]}, in of {filled[1]}"
        )


def _plain(stored: Format, dense: Tensor) -> dict[str, Tensor]:
    rows, columns = dense.shape[-2:]
    high, wide = formats.block_of(stored)
    high, wide = high or rows, wide or columns
    padded = torch.nn.functional.pad(dense, (0, -columns % wide, 0, -rows % high))
    blocks = torch.unflatten(torch.unflatten(padded, -1, (-1, wide)), -3, (-1, high))
    scale = _scale(blocks.abs().amax((-3, -1)) / _LARGEST[stored.logical], stored)
    q = blocks / scale.float()[..., :, None, :, None]
    q = q.clamp(-_LARGEST[stored.logical], _LARGEST[stored.logical])
    q = q.round() if stored.logical == "int8" else q
    weight = q.flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    if stored.granularity == "tensor":
        scale = scale.reshape(dense.shape[:-2])
    return {"weight": weight.to(getattr(torch, stored.dtype)).contiguous(), "scale": scale}


def _scale(scale: Tensor, stored: Format) -> Tensor:
    if stored.scale_dtype == "float8_e8m0fnu":
        # The next power of two, so that nothing overflows; 0 has none.
        powers = torch.exp2(scale.clamp(min=2.0**-126).log2().ceil())
        return powers.to(torch.float8_e8m0fnu)
    rounded = scale.to(getattr(torch, str(stored.scale_dtype)))
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def _words(stored: Format, dense: Tensor, g_idx: Tensor | None) -> dict[str, Tensor]:
    columns = dense.shape[-1]
    most = (1 << formats.code_of(stored).bits) - 1
    size = formats.block_of(stored)[1] or columns
    groups = torch.arange(columns) // size if g_idx is None else g_idx.long()
    by_group = torch.unflatten(dense[..., groups.argsort(stable=True)], -1, (-1, size))
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    if stored.zero_points:
        scale = _scale((high - low) / most, stored)
        # GPTQ's first form can't store a zero point of 0.
        zeros = (-low / scale.float()).round().clamp(1, most)
    else:
        scale = _scale(torch.maximum(high, -low) / (most // 2), stored)
        zeros = torch.full_like(low, (most + 1) // 2)
    wide, offsets = scale.float()[..., groups], zeros[..., groups]
    codes = ((dense / wide).round() + offsets).clamp(0, most).to(torch.uint8)
    rows_first = stored.packing in ("gptq", "gptq_v2", "awq")
    tensors = {
        "weight": pack_weight(stored, codes),
        "scale": scale.transpose(-1, -2).contiguous() if rows_first else scale,
    }
    if stored.zero_points:
        tensors["zeros"] = pack_zeros(stored, zeros.short())
    if g_idx is not None:
        tensors["g_idx"] = g_idx
    return tensors


def _mxfp4(stored: Format, dense: Tensor) -> dict[str, Tensor]:
    groups = torch.unflatten(dense, -1, (-1, 32))
    # OCP Microscaling Formats 1.0, 6.3: the exponent of the largest, less e2m1's own largest.
    exponent = groups.abs().amax(-1).clamp(min=2.0**-126).log2().floor() - 2
    exponent = exponent.clamp(-127, 127)
    wanted = torch.ldexp(groups, -exponent[..., None])
    values = torch.tensor(_E2M1)
    distance = (wanted.abs()[..., None] - values).abs()
    # Of two as near the even code; argmin takes the first, so odd codes are put a hair off.
    code = (distance + 1e-6 * (torch.arange(8) % 2)).argmin(-1)
    code = (code + 8 * (wanted < 0)).to(torch.uint8)
    return {
        "weight": pack_weight(stored, code.flatten(-2)),
        "scale": (exponent + 127).to(torch.uint8),
    }
