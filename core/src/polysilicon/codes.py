"""The numbers of quantised weights: from the words that checkpoints store, and back.

`polysilicon.formats` says what each format stores. Every function takes tensors with any number of
leading dims (experts); N and K are the logical out and in of a weight.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon import formats

if TYPE_CHECKING:
    from polysilicon.records import Format

#: Place in a word → the column that AWQ puts there.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_ROWS_FIRST = ("gptq", "gptq_v2", "awq")


_parse = functools.lru_cache(maxsize=256)(formats.parse)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def named(text: str) -> Format:
    """`formats.parse`, remembered: ops are called with the text."""
    return _parse(text)


def out_features(stored: Format, weight: Tensor) -> int:
    """N of a stored weight."""
    if stored.packing == "awq":
        return int(weight.shape[-1]) * 8
    if stored.packing in _ROWS_FIRST:
        return int(weight.shape[-1])
    return int(weight.shape[-3 if stored.logical == "mxfp4" else -2])


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] → uint8 [..., W · 32/bits], the lowest bits of a word first."""
    octets = _octets(words).flatten(-2)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _octets(words: Tensor) -> Tensor:
    """int32 [..., W] → uint8 [..., W, 4]; the further dim is what may always be viewed so."""
    return words.unsqueeze(-1).view(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_words`; a last word that is not full is filled up with zeros."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    if bits == 4:
        pairs = torch.unflatten(codes, -1, (-1, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    octets = torch.unflatten(codes, -1, (-1, 4)).clone(memory_format=torch.contiguous_format)
    return octets.view(torch.int32).squeeze(-1)


def unpack_weight(stored: Format, weight: Tensor, columns: int) -> Tensor:
    """The codes [..., N, K] of a weight: uint8 of packed ones, else the storage dtype."""
    bits = formats.code_of(stored).bits
    if stored.packing in ("gptq", "gptq_v2"):
        return unpack_words(weight.transpose(-1, -2), bits)
    if stored.packing == "awq":
        return _awq_columns(weight)
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
        pairs = torch.unflatten(codes, -1, (-1, 16, 2))
        return pairs[..., 0] | (pairs[..., 1] << 4)
    return codes


def unpack_zeros(stored: Format, zeros: Tensor, rows: int) -> Tensor:
    """The zero points [..., N, G] as the codes that mean zero, int16."""
    if stored.packing == "awq":
        return _awq_columns(zeros).short()
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
    """int32 [..., K, W] → codes [..., 8·W, K].

    A column's number within its word is, in bits, b2 b1 b0: b0 and b2 are those of the octet's
    number in the word and b1 says which half of the octet, so a transposition does it.
    """
    octets = torch.unflatten(_octets(words), -1, (2, 2))  # K, W, b0, b2
    octets = octets.movedim(-4, -1).transpose(-2, -3).contiguous()  # W, b2, b0, K
    return torch.stack((octets & 15, octets >> 4), -3).flatten(-5, -2)


def _awq_words(codes: Tensor) -> Tensor:
    places = torch.unflatten(codes, -1, (-1, 8))
    return pack_words(torch.stack([places[..., column] for column in _AWQ], -1).flatten(-2), 4)


def rows_of(
    stored: Format,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight, scale and zeros of the rows `first` to `last` of [N, K], as views.

    `first` is a multiple of `granule(stored)`, and so is `last` unless it is N.
    """
    high, per_word = formats.block_of(stored)[0], 32 // formats.code_of(stored).bits
    if stored.packing in _ROWS_FIRST:
        words = slice(first // per_word, -(-last // per_word))
        cut = words if stored.packing == "awq" else slice(first, last)
        assert zeros is not None
        return weight[..., cut], scale[..., first:last], zeros[..., words]
    if stored.logical == "mxfp4":
        return weight[..., first:last, :, :], scale[..., first:last, :], None
    rows = weight[..., first:last, :]
    if zeros is not None:
        zeros = zeros[..., first // per_word : -(-last // per_word), :]
    if not high:
        return rows, scale, zeros
    if scale.dim() < weight.dim():  # [N], one a row
        return rows, scale[..., first:last], zeros
    return rows, scale[..., first // high : -(-last // high), :], zeros


def granule(stored: Format) -> int:
    """Rows that can't be told apart: they share a word or a scale."""
    return math.lcm(8, formats.block_of(stored)[0] or 1)


def decode_to(
    dtype: torch.dtype,
    stored: Format,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    columns: int,
) -> Tensor:
    """`decode` of one weight [N, K], rounded to `dtype`, some rows at a time.

    What is made on the way stays in a core's cache, and the memory needed beside the result small.
    """
    rows, step = out_features(stored, weight), granule(stored)
    step *= max(1, _CACHED // max(1, columns * step))
    dense = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        parts = rows_of(stored, weight, scale, zeros, first, last)
        dense[first:last] = decode(stored, *parts, g_idx, columns)
    return dense


#: Numbers that `decode_to` makes at once: a megabyte of float32.
_CACHED = 1 << 18


def decode(
    stored: Format,
    weight: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    columns: int,
) -> Tensor:
    """The dense weight float32 [..., N, K]: (q - z) · s, each in float32."""
    values = _numbers(stored, unpack_weight(stored, weight, columns))
    if zeros is not None:
        offsets = unpack_zeros(stored, zeros, values.shape[-2]).float()
        view, by_group = _spread(stored, values, offsets, g_idx)
        view.sub_(by_group)
    elif stored.packing:
        values.sub_(float(1 << (formats.code_of(stored).bits - 1)))
    view, by_group = _spread(stored, values, _scales(stored, scale), g_idx)
    view.mul_(by_group)
    return values


def _numbers(stored: Format, codes: Tensor) -> Tensor:
    """The numbers that codes are, float32 in fresh memory."""
    if stored.logical == "mxfp4":
        # The bits of e2m1 as those of a float16, whose exponent is biased by 14 more.
        wide = codes.short()
        half = (((wide & 8) << 12) | ((wide & 7) << 9)).view(torch.float16)
        return half.float().mul_(2.0**14)
    if codes.dtype is torch.float8_e4m3fn and codes.device.type == "cpu":
        return _e4m3fn(codes)
    return codes.float()


def _e4m3fn(codes: Tensor) -> Tensor:
    """codes.float(), which takes one number at a time on a CPU."""
    wide = codes.view(torch.uint8).short()
    size = wide & 127
    # As for e2m1, 8 more; 127 is NaN, and so is a float16 whose exponent is all ones.
    half = ((wide & 128) << 8) | ((size << 7) + (((size + 1) & 128) << 7))
    return half.view(torch.float16).float().mul_(2.0**8)


def _scales(stored: Format, scale: Tensor) -> Tensor:
    """Scales as float32 [..., N/r, G], whatever the checkpoint's order."""
    if stored.logical == "mxfp4":
        # Bit for bit: the eight bits are float32's exponent; 0 is 2^-127, 255 NaN.
        scale = scale.view(torch.float8_e8m0fnu)
    if stored.packing in _ROWS_FIRST:
        scale = scale.transpose(-1, -2)
    return scale.float()


def _spread(
    stored: Format, values: Tensor, by_group: Tensor, g_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A view of values [..., N, K], and the number of each one's group so that it broadcasts."""
    rows, columns = values.shape[-2:]
    high, wide = formats.block_of(stored)
    if not high:
        leading = values.shape[:-2] if by_group.numel() > 1 else ()
        return values, by_group.reshape(*leading, 1, 1)
    if high > 1:
        by_group = by_group.repeat_interleave(high, -2)[..., :rows, :]
    if g_idx is not None:
        return values, by_group.index_select(-1, g_idx.long())
    if not wide:
        return values, by_group.reshape(*values.shape[:-1], 1)
    if columns % wide:
        return values, by_group.repeat_interleave(wide, -1)[..., :columns]
    return torch.unflatten(values, -1, (-1, wide)), by_group[..., None]
