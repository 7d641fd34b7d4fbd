"""Where each byte lies: golden values of the compiler, and every bit back after unpacking."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon_tpu.layout import (
    LAYOUTS,
    TpuTiling,
    interleave_kv,
    pack,
    pack_pages,
    padding_report,
    unpack,
    unpack_pages,
)

# As the compiler of libtpu 0.0.42.1 writes them; tests/aot asks it again.
GOLDEN = [
    ((64,), "bfloat16", "bf16[64]{0:T(256)(128)(2,1)}", 4.0),
    ((300,), "float32", "f32[300]{0:T(512)}", 512 / 300),
    ((5000,), "float32", "f32[5000]{0:T(1024)}", 5120 / 5000),
    ((1, 4096), "float32", "f32[1,4096]{1,0:T(1,128)}", 1.0),
    ((1, 4096), "bfloat16", "bf16[1,4096]{1,0:T(2,128)(2,1)}", 2.0),
    ((1, 4096), "int8", "s8[1,4096]{1,0:T(4,128)(4,1)}", 4.0),
    ((1, 4096), "int4", "s4[1,4096]{1,0:T(8,128)(8,1)E(4)}", 8.0),
    ((17, 130), "bfloat16", "bf16[17,130]{1,0:T(8,128)(2,1)}", 24 * 256 / (17 * 130)),
    ((32, 128), "int8", "s8[32,128]{1,0:T(32,128)(4,1)}", 1.0),
    ((33, 4096), "float8_e4m3fn", "f8e4m3fn[33,4096]{1,0:T(8,128)(4,1)}", 40 / 33),
    ((64, 128), "int4", "s4[64,128]{1,0:T(64,128)(8,1)E(4)}", 1.0),
    ((4096, 8), "float32", "f32[4096,8]{0,1:T(8,128)}", 1.0),
    ((1024, 576), "bfloat16", "bf16[1024,576]{0,1:T(8,128)(2,1)}", 1.0),
    ((0, 64), "float32", "f32[0,64]{1,0}", 1.0),
    ((2, 3, 100), "float32", "f32[2,3,100]{2,0,1:T(2,128)}", 128 / 100),
    ((100, 16, 2, 128), "int8", "s8[100,16,2,128]{3,1,2,0:T(8,128)(4,1)}", 1.0),
]


@pytest.mark.parametrize(("shape", "dtype", "written", "waste"), GOLDEN)
def test_layout_is_the_compilers(
    shape: tuple[int, ...], dtype: str, written: str, waste: float
) -> None:
    tiling = TpuTiling(shape=shape, dtype=dtype)
    assert tiling.describe() == written
    assert tiling.waste == pytest.approx(waste)


def test_cache_of_small_heads_would_have_its_blocks_along_the_lanes() -> None:
    # The trap: a kernel wants rows of heads, so each call would copy the whole cache.
    trap = TpuTiling(shape=(8192, 16, 8, 64), dtype="bfloat16")
    assert trap.describe().startswith("bf16[8192,16,8,64]{0,3,2,1:")


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_blocks_of_the_cache_are_whole_tiles_whatever_the_heads(heads: int, dtype: str) -> None:
    (cache,) = (layout for layout in LAYOUTS if layout.name == "tpu.kv_heads_blocks")
    sizes = {"heads": heads, "blocks": 100, "tokens": cache.facts["block_size"], "head_size": 128}
    shape = tuple(int(sizes[dim] or 0) for dim in cache.dims)
    tiling = TpuTiling(shape=shape, dtype=dtype)
    assert (tiling.waste, tiling.order) == (1.0, (0, 1, 2, 3))


def test_sixteen_bit_rows_share_words_in_pairs() -> None:
    x = torch.arange(24 * 256, dtype=torch.int16).view(24, 256)
    flat = pack(x).flatten()
    row, lane = 13, 200
    tile = (row // 8) * 2 + lane // 128
    offset = tile * 1024 + (row % 8 // 2) * 256 + (lane % 128) * 2 + row % 2
    assert flat[offset] == x[row, lane]


def test_whole_tiles_of_bytes_are_thirty_two_rows() -> None:
    x = (torch.arange(64 * 128) % 251).to(torch.uint8).view(64, 128)
    tiles = pack(x)
    assert tiles.shape == (2, 1, 8, 128, 4)
    assert tiles[1, 0, 3, 77, 2] == x[32 + 3 * 4 + 2, 77]


def test_vector_of_halves_interleaves_runs_of_128() -> None:
    x = torch.arange(1000, dtype=torch.int16)
    flat = pack(x).flatten()
    assert flat.numel() == 1024
    assert flat[:4].tolist() == [0, 128, 1, 129]


def test_padding_is_zero_and_a_float32_tile_is_row_major() -> None:
    x = torch.ones(3, 100)
    tiles = pack(x)
    assert tiles.shape == (1, 1, 4, 128, 1)
    assert tiles.sum() == 300
    assert torch.equal(tiles[0, 0, :3, :100, 0], x)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e5m2]
SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple)


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every pattern of bits, NaNs included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    made = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))
    return made.to(torch.uint8).view(dtype).view(shape)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)
    )


@settings(deadline=None, max_examples=150)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 99))
def test_unpacking_gives_back_every_bit(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    x = _random_bits(shape, dtype, seed)
    tiling = TpuTiling(shape=shape, dtype=str(dtype).removeprefix("torch."))
    physical = pack(x)
    assert physical.shape == tiling.physical_shape
    assert physical.numel() * dtype.itemsize == tiling.padded_bytes
    assert _same_bits(unpack(physical, shape), x)


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(3)), st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_any_order_of_dims_packs_and_unpacks(order: list[int], sizes: list[int]) -> None:
    x = _random_bits(tuple(sizes), torch.bfloat16, 0)
    tiling = TpuTiling(shape=tuple(sizes), dtype="bfloat16", order=tuple(order))
    assert _same_bits(tiling.unpack(tiling.pack(x)), x)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(*[st.integers(0, 5)] * 2, st.integers(1, 9), st.integers(1, 200)),
    st.sampled_from(DTYPES),
)
def test_pages_give_back_every_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = _random_bits(shape, dtype, 1)
    assert _same_bits(unpack_pages(pack_pages(x), shape), x)


def test_pages_hold_a_head_and_its_value_in_one_word() -> None:
    k, v = (torch.full((3, 4, 2, 64), n, dtype=torch.bfloat16) for n in (1.0, 2.0))
    pages = pack_pages(interleave_kv(k, v))
    assert pages.shape == (3, 4, 2, 2, 128)
    assert pages[0, 0, 1, :, 0].tolist() == [1.0, 2.0]
    assert not pages[..., 64:].any()


def test_report_begins_with_the_largest_waste_and_ends_with_the_sum() -> None:
    report = padding_report(
        [("norm", (64,), torch.bfloat16), ("down", (17, 130), "bfloat16"), ("up", (8, 128), "int8")]
    ).splitlines()
    assert report[0] == "down: 4,420 bytes take 12,288 (2.78×) bf16[17,130]{1,0:T(8,128)(2,1)}"
    assert report[-1] == "all: 5,572 bytes take 13,824 (2.48×)"


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64])
def test_dtype_that_a_tpu_does_not_store_is_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="cast to one of float32"):
        pack(torch.zeros(2, 2, dtype=dtype))


def test_wrong_arguments_are_told_apart() -> None:
    with pytest.raises(ValueError, match="one dim or more"):
        TpuTiling(shape=(), dtype="float32")
    with pytest.raises(ValueError, match="each dim once"):
        TpuTiling(shape=(2, 3), dtype="float32", order=(0, 0))
    with pytest.raises(
        ValueError, match=r"unpack got shape \(2, 3\): expected \(1, 1, 2, 128, 1\)"
    ):
        unpack(torch.zeros(2, 3), (2, 3))
    with pytest.raises(ValueError, match=r"pack got float32 \(2, 3\): expected bfloat16 \(2, 3\)"):
        TpuTiling(shape=(2, 3), dtype="bfloat16").pack(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="only its sizes are known"):
        TpuTiling(shape=(2, 3), dtype="int4").pack(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"unpack_pages got shape"):
        unpack_pages(torch.zeros(1, 1, 1, 1, 64), (1, 1, 1, 64))
    with pytest.raises(ValueError, match=r"expected two \[pages, page, H, D\]"):
        interleave_kv(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2))
