"""What the conformance suite can't know of the layouts: where an element lies, and every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polysilicon_amd import layout
from polysilicon_amd.device import absent
from polysilicon_amd.layout import layouts

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.int8),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float64),
)
_dtypes = st.sampled_from(DTYPES)


def _bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any bits there are: NaN of every kind, −0, infinities."""
    generator = torch.Generator().manual_seed(seed)
    # Flat, as an empty tensor of several dims can't be viewed in a wider dtype.
    count = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_form = one.dtype == other.dtype and one.shape == other.shape
    flat = (tensor.flatten().view(torch.uint8) for tensor in (one, other))
    return same_form and torch.equal(*flat)


_sizes = st.integers(0, 70)


@given(_sizes, _sizes, _dtypes, st.integers(0, 99), st.sampled_from(["shuffle16", "padded_rows"]))
def test_weights_come_back_bit_for_bit(
    rows: int, width: int, dtype: torch.dtype, seed: int, name: str
) -> None:
    weight = _bits((rows, width), dtype, seed)
    packed = getattr(layout, f"pack_{name}")(weight)
    assert _same(getattr(layout, f"unpack_{name}")(packed, (rows, width)), weight)


@given(
    st.tuples(*[st.integers(1, 5), st.integers(1, 33), st.integers(1, 3), st.integers(1, 40)]),
    _dtypes,
    st.integers(0, 99),
    st.sampled_from(["kv_k", "kv_v"]),
)
def test_caches_come_back_bit_for_bit(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int, name: str
) -> None:
    cache = _bits(shape, dtype, seed)
    packed = getattr(layout, f"pack_{name}")(cache)
    assert _same(getattr(layout, f"unpack_{name}")(packed, shape), cache)


# --- where an element lies -----------------------------------------------------------------------


@given(st.integers(0, 39), st.integers(0, 99), st.sampled_from([1, 2, 4]))
def test_shuffled_element_lies_where_the_formula_says(n: int, k: int, size: int) -> None:
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    weight = torch.zeros(40, 100, dtype=dtype)
    weight[n, k] = 1
    x, padded = 16 // size, 128
    place = ((n // 16 * (padded // x) + k // x) * 16 + n % 16) * x + k % x
    assert layout.pack_shuffle16(weight).flatten().nonzero().tolist() == [[place]]


def test_shuffle_of_whole_tiles_is_a_permutation_of_views() -> None:
    weight = torch.arange(32 * 64, dtype=torch.int16).view(32, 64)
    # N/16, 16, K/32, 32/x, x with the 16 rows moved inside, as AITER writes it.
    expected = weight.view(2, 16, 2, 4, 8).permute(0, 2, 3, 1, 4).contiguous()
    assert torch.equal(layout.pack_shuffle16(weight).flatten(), expected.flatten())


def test_shuffle_pads_rows_to_16_and_inputs_to_32() -> None:
    assert layout.pack_shuffle16(torch.zeros(17, 33, dtype=torch.bfloat16)).shape == (2, 8, 16, 8)
    assert layout.pack_shuffle16(torch.zeros(16, 32, dtype=torch.int8)).shape == (1, 2, 16, 16)


@pytest.mark.parametrize(
    ("width", "dtype", "padded"),
    [
        (4096, torch.bfloat16, 4096 + 128),
        (4096, torch.int8, 4096 + 256),
        (256, torch.bfloat16, 256 + 128),
        (255, torch.bfloat16, 255),
        (4096 + 8, torch.bfloat16, 4096 + 8),
    ],
)
def test_rows_get_256_bytes_where_they_would_share_channels(
    width: int, dtype: torch.dtype, padded: int
) -> None:
    assert layout.pack_padded_rows(torch.ones(3, width, dtype=dtype)).shape == (3, padded)


def test_padded_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \(3, 384\) for a logical \(3, 256\)"):
        layout.unpack_padded_rows(torch.zeros(3, 256, dtype=torch.bfloat16), (3, 256))


def test_cache_elements_lie_in_16_byte_pieces() -> None:
    cache = torch.arange(2 * 16 * 3 * 64).view(2, 16, 3, 64).to(torch.int16)
    keys, values = layout.pack_kv_k(cache), layout.pack_kv_v(cache)
    assert (keys.shape, values.shape) == ((2, 3, 8, 16, 8), (2, 3, 2, 64, 8))
    assert keys[1, 2, 5, 9, 3] == cache[1, 9, 2, 5 * 8 + 3]
    assert values[1, 2, 1, 33, 3] == cache[1, 1 * 8 + 3, 2, 33]


# --- fnuz ----------------------------------------------------------------------------------------

_EVERY_FN = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
_MINUS_ZERO = 0x80
_NANS = (0x7F, 0xFF)


def test_fnuz_reads_half_of_every_number() -> None:
    packed = layout.pack_fnuz(_EVERY_FN)
    multiplier = float(layout.FNUZ.facts["scale_multiplier"] or 0)
    assert packed.dtype == torch.float8_e4m3fnuz
    # Equal as numbers: −0 and 0 are, and NaN stays NaN.
    torch.testing.assert_close(
        packed.float() * multiplier, _EVERY_FN.float(), rtol=0, atol=0, equal_nan=True
    )


def test_fnuz_comes_back_bit_for_bit_but_for_minus_zero_and_the_sign_of_nan() -> None:
    back = layout.unpack_fnuz(layout.pack_fnuz(_EVERY_FN)).view(torch.uint8)
    changed = {bits: int(back[bits]) for bits in range(256) if back[bits] != bits}
    assert changed == {_MINUS_ZERO: 0, _NANS[1]: _NANS[0]}


def test_fnuz_bits_are_those_of_fn() -> None:
    packed = layout.pack_fnuz(_EVERY_FN).view(torch.uint8)
    changed = {bits: int(packed[bits]) for bits in range(256) if packed[bits] != bits}
    # fn's NaNs would read 240 and −240.
    assert changed == {_MINUS_ZERO: 0, _NANS[0]: 0x80, _NANS[1]: 0x80}


def test_fnuz_numbers_beyond_fn_are_refused() -> None:
    with pytest.raises(ValueError, match="whose double float8_e4m3fn can't hold"):
        layout.unpack_fnuz(torch.tensor([240.0]).to(torch.float8_e4m3fnuz))


def test_fnuz_takes_fn_only() -> None:
    with pytest.raises(ValueError, match=r"got torch.float8_e5m2: expected torch.float8_e4m3fn"):
        layout.pack_fnuz(torch.zeros(1).to(torch.float8_e5m2))


# --- which chip has which ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "further"),
    [
        ("gfx942", {"amd.padded_rows", "amd.fnuz"}),
        ("gfx950", set()),
        ("gfx1100", set()),
        ("gfx1201", set()),
    ],
)
def test_chips_have_the_layouts_that_help_them(chip: str, further: set[str]) -> None:
    names = [found.name for found in layouts(absent(f"amd:{chip}"))]
    everywhere = {
        "amd.weight",
        "amd.shuffle16",
        "amd.kv_nhd",
        "amd.kv_shuffle_k",
        "amd.kv_shuffle_v",
    }
    assert set(names) == everywhere | further
    assert names[0] == "amd.weight"


def test_the_usual_cache_is_an_order_of_dims() -> None:
    first = next(found for found in layouts(absent("amd:mi300x")) if found.role == "kv_block")
    assert (first.pack, first.dims) == (None, ("blocks", "tokens", "heads", "head_size"))
