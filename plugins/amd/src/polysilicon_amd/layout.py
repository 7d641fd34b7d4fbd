"""How tensors lie in the memory of AMD's GPUs: data, and functions that pack and unpack.

In every layout but `amd.fnuz` packing moves bits and adds zeros, so unpacking gives back each bit.
`x` is the number of elements in 16 bytes, which one lane loads at a time: 8 of bfloat16, 16 of fp8.

`amd.shuffle16`: element [n, k] of a weight [N, K] lies, with Kp = K rounded up to 32, at

    ((n // 16 * (Kp / x) + k // x) * 16 + n % 16) * x + k % x

so 16 rows by 16 bytes of K are 256 contiguous bytes, and a wave of 64 lanes that loads 16 bytes
each, lane after lane, has the B operand of a 16 × 16 matrix instruction: lane l holds row l % 16.
For whole tiles this is byte for byte the (16, 16) pre-shuffle of AMD's AITER.

`amd.kv_shuffle_k`, `amd.kv_shuffle_v`: a cache [blocks, tokens, heads, D] as K
[blocks, heads, D/x, tokens, x] and V [blocks, heads, tokens/x, D, x]: what attention sums over
lies in 16-byte pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Layout, Tiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.api import Device

#: Rows of one tile: the columns of a matrix instruction's B operand.
ROWS = 16
#: K is padded to a multiple of what one 16-bit matrix instruction of CDNA4 sums over.
STEP = 32
_LANE_BYTES = 16
#: On CDNA3, rows of a multiple of this many bytes all begin in the same few memory channels …
_CHANNELS_BYTES = 512
#: … and rows that are this much longer don't.
_ROW_PADDING_BYTES = 256

_KV_DIMS = ("blocks", "tokens", "heads", "head_size")
_HERE = "polysilicon_amd.layout"

ROW_MAJOR = Layout(name="amd.weight", role="linear_weight", dims=("N", "K"))
SHUFFLED = Layout(
    name="amd.shuffle16",
    role="linear_weight",
    dims=("N/16", "K/x", "16", "x"),
    pack=f"{_HERE}:pack_shuffle16",
    unpack=f"{_HERE}:unpack_shuffle16",
)
PADDED_ROWS = Layout(
    name="amd.padded_rows",
    role="linear_weight",
    dims=("N", "K"),
    pack=f"{_HERE}:pack_padded_rows",
    unpack=f"{_HERE}:unpack_padded_rows",
)
#: The same numbers are half as large in fnuz: multiply the weight's scale by the fact.
FNUZ = Layout(
    name="amd.fnuz",
    role="linear_weight",
    dims=("N", "K"),
    pack=f"{_HERE}:pack_fnuz",
    unpack=f"{_HERE}:unpack_fnuz",
    facts={"dtypes": "float8_e4m3fn", "scale_multiplier": 2.0},
)
KV = Layout(name="amd.kv_nhd", role="kv_block", dims=_KV_DIMS, facts={"block_size": 16})
KV_K = Layout(
    name="amd.kv_shuffle_k",
    role="kv_block",
    dims=("blocks", "heads", "head_size/x", "tokens", "x"),
    pack=f"{_HERE}:pack_kv_k",
    unpack=f"{_HERE}:unpack_kv_k",
    facts={"block_size": 16},
)
KV_V = Layout(
    name="amd.kv_shuffle_v",
    role="kv_block",
    dims=("blocks", "heads", "tokens/x", "head_size", "x"),
    pack=f"{_HERE}:pack_kv_v",
    unpack=f"{_HERE}:unpack_kv_v",
    facts={"block_size": 16},
)


def layouts(device: Device) -> list[Layout]:
    """The layouts of an AMD device, the usual one of each role first."""
    weights = [ROW_MAJOR, SHUFFLED]
    if device.facts["family"] == "cdna3":
        weights.append(PADDED_ROWS)
    if device.facts["fp8"] == "fnuz":
        weights.append(FNUZ)
    return [*weights, KV, KV_K, KV_V]


def lane_elements(element_bytes: int) -> int:
    """Elements in the 16 bytes that a lane loads at a time."""
    return _LANE_BYTES // element_bytes


# --- weights -----------------------------------------------------------------------------------


def pack_shuffle16(weight: Tensor) -> Tensor:
    """[N, K] → [N/16, K/x, 16, x]; K is padded to 32, N to 16, with zeros."""
    return _tiles(weight).pack(_STEPS.pack(weight))


def unpack_shuffle16(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the weight of `shape` [N, K]."""
    padded = _tiles(tiles).unpack(tiles, _STEPS.physical_shape(shape))
    return _STEPS.unpack(padded, shape)


_STEPS = Tiled(dims=("N", "K"), tiles={"N": ROWS, "K": STEP}, blocked=False)


def _tiles(like: Tensor) -> Tiled:
    return Tiled(dims=("N", "K"), tiles={"N": ROWS, "K": lane_elements(like.element_size())})


def pack_padded_rows(weight: Tensor) -> Tensor:
    """[N, K] → rows of 256 bytes more where a row is a multiple of 512 bytes, else as they are."""
    rows, width = weight.shape
    padding = _row_padding(width, weight.element_size())
    padded = weight.new_zeros(rows, width + padding)
    padded[:, :width] = weight
    return padded


def unpack_padded_rows(padded: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the weight of `shape` [N, K].

    Raises:
        ValueError: these are not the rows of a weight of that shape.
    """
    rows, width = shape
    expected = (rows, width + _row_padding(width, padded.element_size()))
    if tuple(padded.shape) != expected:
        raise ValueError(
            f"unpack got shape {tuple(padded.shape)}: expected {expected} for a logical {shape}"
        )
    return padded[:, :width].contiguous()


def _row_padding(width: int, element_bytes: int) -> int:
    if width == 0 or width * element_bytes % _CHANNELS_BYTES:
        return 0
    return _ROW_PADDING_BYTES // element_bytes


# --- fp8 ---------------------------------------------------------------------------------------

_FN_NAN, _FN_SIGN = 0x7F, 0x80
_FNUZ_NAN, _FNUZ_LARGEST = 0x80, 0x7F


def pack_fnuz(weight: Tensor) -> Tensor:
    """float8_e4m3fn → float8_e4m3fnuz of half the value: the same bits, but for −0 and NaN.

    fnuz has one zero and one NaN: −0 becomes 0, and both of fn's NaNs, which as they are would
    read 240 and −240, become its NaN. Every other value comes back exactly, twice what fnuz reads.

    Raises:
        ValueError: the weight is of another dtype.
    """
    import torch

    _check_dtype(weight, torch.float8_e4m3fn)
    bits = weight.view(torch.uint8)
    nan = (bits & _FN_NAN) == _FN_NAN
    packed = bits.masked_fill(bits == _FN_SIGN, 0).masked_fill(nan, _FNUZ_NAN)
    return packed.view(torch.float8_e4m3fnuz)


def unpack_fnuz(weight: Tensor) -> Tensor:
    """float8_e4m3fnuz → float8_e4m3fn of twice the value.

    Raises:
        ValueError: the weight is of another dtype, or holds ±240, which no fn weight was: twice
            that is more than fn can say.
    """
    import torch

    _check_dtype(weight, torch.float8_e4m3fnuz)
    bits = weight.view(torch.uint8)
    if bool(((bits & _FNUZ_LARGEST) == _FNUZ_LARGEST).any()):
        raise ValueError(
            "unpack_fnuz got ±240, whose double float8_e4m3fn can't hold: this weight was not "
            "packed from float8_e4m3fn; keep it as float8_e4m3fnuz"
        )
    return bits.masked_fill(bits == _FNUZ_NAN, _FN_NAN).view(torch.float8_e4m3fn)


def _check_dtype(weight: Tensor, expected: object) -> None:
    if weight.dtype != expected:
        raise ValueError(f"layout amd.fnuz got {weight.dtype}: expected {expected}")


# --- KV cache ----------------------------------------------------------------------------------


def pack_kv_k(cache: Tensor) -> Tensor:
    """[blocks, tokens, heads, D] → [blocks, heads, D/x, tokens, x]; D padded to x with zeros."""
    return _kv(cache, "head_size").pack(cache)


def unpack_kv_k(cache: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the keys of `shape` [blocks, tokens, heads, D]."""
    return _kv(cache, "head_size").unpack(cache, shape)


def pack_kv_v(cache: Tensor) -> Tensor:
    """[blocks, tokens, heads, D] → [blocks, heads, tokens/x, D, x]; tokens padded to x."""
    return _kv(cache, "tokens").pack(cache)


def unpack_kv_v(cache: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse: the values of `shape` [blocks, tokens, heads, D]."""
    return _kv(cache, "tokens").unpack(cache, shape)


def _kv(like: Tensor, split: str) -> Tiled:
    last = ("head_size", "tokens") if split == "head_size" else ("tokens", "head_size")
    tiles = {split: lane_elements(like.element_size())}
    return Tiled(dims=_KV_DIMS, tiles=tiles, order=("blocks", "heads", *last))
