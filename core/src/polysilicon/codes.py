"""The numbers of quantised weights: from the words that checkpoints store, and back.

`polysilicon.formats` says what each format stores. Every function takes tensors with any number of
leading dims (experts); N and K are the logical out and in of a weight.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon import formats

if TYPE_CHECKING:
    from polysilicon.records import Format

#: Place in a word → the column that AWQ puts there, and the other way round.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_INVERSE = tuple(sorted(range(8), key=_AWQ.__getitem__))
#: e2m1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS_FIRST = ("gptq", "gptq_v2", "awq")


@functools.lru_cache(maxsize=256)
def named(text: str) -> Format:
    """`formats.parse`, remembered: ops are called with the text."""
    return formats.parse(text)


def out_features(stored: Format, weight: Tensor) -> int:
    """N of a stored weight."""
    if stored.packing == "awq":
        return int(weight.shape[-1]) * 8
    if stored.packing in _ROWS_FIRST:
        return int(weight.shape[-1])
    return int(weight.shape[-3 if stored.logical == "mxfp4" else -2])


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] → uint8 [..., W · 32/bits], the lowest bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_words`; a last word that is not full is filled up with zeros."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    if bits == 4:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return codes.contiguous().view(torch.int32)


def unpack_weight(stored: Format, weight: Tensor, columns: int) -> Tensor:
    """The codes [..., N, K] of a weight: uint8 of packed ones, else the storage dtype."""
    bits = formats.code_of(stored).bits
    if stored.packing in ("gptq", "gptq_v2"):
        return unpack_words(weight.transpose(-1, -2), bits)
    if stored.packing == "awq":
        return _awq_columns(weight).transpose(-1, -2)
    if stored.packing == "compressed_tensors":
        return unpack_words(weight, bits)[..., :columns]
    if stored.logical == "mxfp4":
        return torch.stack((weight & 15, weight >> 4), -1).flatten(-3)
    return weight


def pack_weight(stored: Format, codes: Tensor) -> Tensor:
    """The inverse of `unpack_weight`."""
    bits = formats.code_of(stored).bits
    if stored.packing in ("gptq", "gptq_v2"):
        return pack_words(codes, bits).transpose(-1, -2).contiguous()
    if stored.packing == "awq":
        return _awq_words(codes.transpose(-1, -2))
    if stored.packing == "compressed_tensors":
        return pack_words(codes, bits)
    if stored.logical == "mxfp4":
        pairs = codes.unflatten(-1, (-1, 16, 2))
        return pairs[..., 0] | (pairs[..., 1] << 4)
    return codes


def unpack_zeros(stored: Format, zeros: Tensor, rows: int) -> Tensor:
    """The zero points [..., N, G] as the codes that mean zero, int16."""
    if stored.packing == "awq":
        return _awq_columns(zeros).transpose(-1, -2).short()
    bits = formats.code_of(stored).bits
    if stored.packing == "compressed_tensors":
        codes = unpack_words(zeros.transpose(-1, -2), bits)[..., :rows]
    else:
        codes = unpack_words(zeros, bits)[..., :rows]
    # GPTQ's first form stores z - 1, and nothing wraps around: 15 means 16.
    return codes.transpose(-1, -2).short() + (1 if stored.packing == "gptq" else 0)


def pack_zeros(stored: Format, zeros: Tensor) -> Tensor:
    """The inverse of `unpack_zeros`."""
    less = (zeros - 1 if stored.packing == "gptq" else zeros).to(torch.uint8)
    if stored.packing == "awq":
        return _awq_words(less.transpose(-1, -2))
    words = pack_words(less.transpose(-1, -2), formats.code_of(stored).bits)
    if stored.packing == "compressed_tensors":
        return words.transpose(-1, -2).contiguous()
    return words


def _awq_columns(words: Tensor) -> Tensor:
    codes = unpack_words(words, 4).unflatten(-1, (-1, 8))
    return torch.stack([codes[..., place] for place in _AWQ_INVERSE], -1).flatten(-2)


def _awq_words(codes: Tensor) -> Tensor:
    places = codes.unflatten(-1, (-1, 8))
    return pack_words(torch.stack([places[..., column] for column in _AWQ], -1).flatten(-2), 4)


def decode(
    stored: Format,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    columns: int,
) -> Tensor:
    """The dense weight float32 [..., N, K]: (q - z) · s, each in float32."""
    codes = unpack_weight(stored, weight, columns)
    if stored.logical == "mxfp4":
        values = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=codes.device)[codes.int()]
    else:
        values = codes.float()
    rows = values.shape[-2]
    if stored.packing:
        if zeros is not None:
            offsets = unpack_zeros(stored, zeros, rows).float()
            values = _by_group(stored, torch.sub, values, offsets, g_idx)
        else:
            values = values - float(1 << (formats.code_of(stored).bits - 1))
    return _by_group(stored, torch.mul, values, _scales(stored, scale), g_idx)


def _scales(stored: Format, scale: Tensor) -> Tensor:
    """Scales as float32 [..., N/r, G], whatever the checkpoint's order."""
    if stored.logical == "mxfp4":
        # Bit for bit: the eight bits are float32's exponent; 0 is 2^-127, 255 NaN.
        scale = scale.view(torch.float8_e8m0fnu)
    if stored.packing in _ROWS_FIRST:
        scale = scale.transpose(-1, -2)
    return scale.float()


def _by_group(
    stored: Format,
    operation: object,
    values: Tensor,
    by_group: Tensor,
    g_idx: Tensor | None,
) -> Tensor:
    """operation(values [..., N, K], the number of each one's group) in float32."""
    assert callable(operation)
    rows, columns = values.shape[-2:]
    high, wide = formats.block_of(stored)
    if high > 1:
        by_group = by_group.repeat_interleave(high, -2)[..., :rows, :]
    if stored.granularity == "tensor":
        shape = values.shape[:-2] if by_group.numel() > 1 else ()
        result: Tensor = operation(values, by_group.reshape(*shape, 1, 1))
        return result
    if g_idx is not None:
        result = operation(values, by_group.index_select(-1, g_idx.long()))
    elif not wide:
        result = operation(values, by_group.reshape(*values.shape[:-1], 1))
    elif columns % wide:
        result = operation(values, by_group.repeat_interleave(wide, -1)[..., :columns])
    else:
        result = operation(values.unflatten(-1, (-1, wide)), by_group[..., None]).flatten(-2)
    return result
