"""Stick layouts: the values that torch_spyre documents, the identity behind them, and bits."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.api import LayoutError
from polysilicon_spyre.chips import ARRANGEMENTS, STORED
from polysilicon_spyre.formats import narrowed
from polysilicon_spyre.layout import (
    BLOCK_TOKENS,
    LAYOUTS,
    WEIGHT_ORDER,
    layout_of,
    pack_pages,
    pack_weight,
    unpack_pages,
    unpack_weight,
)
from polysilicon_spyre.sticks import RULES, StickLayout

BOTH = pytest.mark.parametrize("rules", RULES)

#: size, dim order, device size, stride map; float16. The first five are torch_spyre's documented
#: examples, the others follow from its rules: rank 0, rank 1, sizes of one, sparse.
GOLDEN: list[tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...], tuple[int, ...]]] = [
    ((5, 100, 150), None, (100, 3, 5, 64), (150, 64, 15000, 1)),
    ((5, 100, 150), (1, 0, 2), (5, 3, 100, 64), (15000, 64, 150, 1)),
    ((1024, 256), None, (4, 1024, 64), (64, 256, 1)),
    ((512, 1, 256), None, (1, 4, 512, 64), (-1, 64, 256, 1)),
    ((300, 100), (1, 0), (5, 100, 64), (6400, 1, 100)),
    ((), None, (1, 64), (-1, -1)),
    ((128,), None, (2, 64), (64, 1)),
    ((7, 1), None, (1, 7, 64), (-1, 1, -1)),
    ((5, 100), (0, 1, -1), (100, 1, 5, 64), (1, -1, 100, -1)),
    ((9,), (0, -1), (1, 9, 64), (-1, 1, -1)),
    ((), (-1,), (1, 64), (-1, -1)),
]


@BOTH
@pytest.mark.parametrize(("size", "order", "device_size", "stride_map"), GOLDEN)
def test_documented_layouts_come_out(
    size: tuple[int, ...], order: Any, device_size: Any, stride_map: Any, rules: Any
) -> None:
    layout = StickLayout.of(size, "float16", rules=rules, dim_order=order)
    assert (layout.device_size, layout.stride_map) == (device_size, stride_map)
    assert layout.device_bytes == 128 * math.prod(device_size[:-1])


@pytest.mark.parametrize(
    ("rules", "stride_map"), [("2026-06", (64, 1)), ("2026-09", (3, 1))], ids=RULES
)
def test_rules_differ_in_the_tile_stride_of_a_padded_dim(rules: Any, stride_map: Any) -> None:
    layout = StickLayout.of((3,), "float16", rules=rules)
    assert (layout.device_size, layout.stride_map) == ((1, 64), stride_map)


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [
        ("float16", 64),
        ("bfloat16", 64),
        ("bool", 64),
        ("float32", 32),
        ("int64", 32),
        ("int32", 32),
        ("int16", 64),
        ("int8", 128),
        ("uint8", 32),
        ("float8_e4m3fn", 128),
    ],
)
def test_elements_a_stick_follow_the_stored_format(dtype: str, elements: int) -> None:
    assert StickLayout.of((1,), dtype, rules="2026-09").elems_per_stick == elements


@BOTH
def test_rank_3_default_is_not_that_of_november_2025(rules: Any) -> None:
    # Which was: tiles of dim 2, dim 0, dim 1, the stick.
    layout = StickLayout.of((5, 100, 150), "float16", rules=rules)
    assert layout.host_dims == (1, 2, 0, 2)


def test_image_is_what_the_documented_transfer_loops_write() -> None:
    x = torch.arange(1024 * 256, dtype=torch.int32).to(torch.float16).reshape(1024, 256)
    host, image = x.flatten(), torch.empty(1024 * 256, dtype=torch.float16)
    for tile in range(4):
        for row in range(1024):
            source, target = row * 256 + tile * 64, (tile * 1024 + row) * 64
            image[target : target + 64] = host[source : source + 64]
    assert torch.equal(layout_of((1024, 256), "float16").pack(x).flatten(), image)


# --- for any shape ------------------------------------------------------------------------------


@st.composite
def _layouts(draw: st.DrawFn, most: int = 70) -> StickLayout:
    rank = draw(st.integers(0, 4))
    size = draw(st.lists(st.integers(0, most if rank < 3 else 9), min_size=rank, max_size=rank))
    order = [*draw(st.permutations(range(rank))), *draw(st.sampled_from([[], [-1]]))]
    return StickLayout.of(
        size,
        draw(st.sampled_from(sorted(STORED))),
        rules=draw(st.sampled_from(RULES)),
        dim_order=order,
    )


def _random_bits(layout: StickLayout) -> torch.Tensor:
    dtype = getattr(torch, layout.dtype)
    count = math.prod(layout.size)
    if dtype is torch.bool:
        return torch.rand(layout.size) < 0.5
    # Any bits: NaN with payloads, subnormals, both zeros.
    raw = bytearray(os.urandom(count * dtype.itemsize) or b"\0" * 8)
    return torch.frombuffer(raw, dtype=dtype)[:count].reshape(layout.size)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    return torch.equal(left.view(bits), right.view(bits))


@settings(max_examples=300, deadline=None)
@given(_layouts())
def test_unpacking_gives_back_every_bit(layout: StickLayout) -> None:
    x = _random_bits(layout)
    image = layout.pack(x)
    assert tuple(image.shape) == layout.device_size
    assert image.is_contiguous()
    back = layout.unpack(image)
    assert back.is_contiguous()
    assert _same_bits(back, x)


@settings(max_examples=60, deadline=None)
@given(_layouts(most=40))
def test_coordinates_times_stride_map_is_the_host_offset(layout: StickLayout) -> None:
    # Whole numbers that float16 and int8 need not hold: the identity is about places.
    numbers = torch.arange(math.prod(layout.size)).reshape(layout.size)
    places = StickLayout.of(layout.size, "int64", rules=layout.rules, dim_order=layout.dim_order)
    image = places.pack(numbers, fill=-1)
    seen = 0
    for coordinates in places.walk():
        held = int(image[coordinates])
        assert places.holds_data(coordinates) == (held >= 0)
        if held >= 0:
            seen += 1
            assert places.host_offset(coordinates) == held
    assert seen == numbers.numel()


@settings(max_examples=100, deadline=None)
@given(_layouts(), st.data())
def test_element_lies_at_its_address(layout: StickLayout, data: st.DataObject) -> None:
    if 0 in layout.size:
        return
    index = tuple(data.draw(st.integers(0, size - 1)) for size in layout.size)
    x = torch.zeros(layout.size, dtype=torch.float32)
    x[index] = 1.0
    places = StickLayout.of(layout.size, "float32", rules=layout.rules, dim_order=layout.dim_order)
    image = places.pack(x)
    assert image.flatten().nonzero().tolist() == [[places.address(index) // 4]]
    assert image[places.coordinates(index)] == 1.0


def test_strided_tensors_pack_like_their_values() -> None:
    x = torch.randn(40, 30)
    layout = layout_of((30, 40), "float32")
    assert torch.equal(layout.pack(x.t()), layout.pack(x.t().contiguous()))


def test_strides_of_the_host_are_in_the_map() -> None:
    layout = StickLayout.of((30, 70), "float32", rules="2026-09", stride=(1, 30))
    assert layout.stride_map == (960, 1, 30)


# --- padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "waste"), [((8, 1), 0.984), ((8, 100), 0.219), ((4, 128), 0.0), ((0, 64), 0.0)]
)
def test_waste_is_the_share_of_padding(size: tuple[int, ...], waste: float) -> None:
    assert StickLayout.of(size, "float16", rules="2026-09").waste == pytest.approx(waste, abs=5e-4)


def test_padding_holds_zeros_or_what_is_asked_for() -> None:
    layout = layout_of((3, 100), "float16")
    ones = torch.ones(3, 100, dtype=torch.float16)
    assert int(layout.pack(ones).ne(0).sum()) == 300
    poisoned = layout.pack(ones, fill=float("nan"))
    # 84 of 384 elements, as counted on torch_spyre's own device memory.
    assert int(poisoned.isnan().sum()) == 84
    assert torch.equal(layout.unpack(poisoned), ones)


def test_whole_numbers_have_no_nan() -> None:
    with pytest.raises(LayoutError, match="int8 has no NaN"):
        layout_of((3,), "int8").pack(torch.zeros(3, dtype=torch.int8), fill=float("nan"))


# --- what the formats lose ----------------------------------------------------------------------


def test_dl16_loses_at_most_one_mantissa_bit() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite() & (x.abs() < 65504)]  # 65504 rounds up, beyond float16
    kept = narrowed(x).float()
    _, exponent = torch.frexp(x.float())
    # float16 has 11 significant bits, DL16 ten: half of the last of ten at most.
    assert bool(((kept - x.float()).abs() <= torch.ldexp(torch.ones(x.shape), exponent - 11)).all())
    assert torch.equal(narrowed(narrowed(x)), narrowed(x))
    few = (x.view(torch.int16) & 1) == 0
    assert _same_bits(narrowed(x[few]), x[few])


def test_dl16_rounds_ties_to_even() -> None:
    x = torch.tensor([1 + 2**-10, 1 + 3 * 2**-10, -1 - 2**-10]).half()
    assert narrowed(x).tolist() == [1.0, 1 + 4 * 2**-10, -1.0]


def test_not_a_number_and_infinity_stay() -> None:
    kept = narrowed(torch.tensor([float("nan"), float("inf"), -float("inf")]).half())
    assert kept.isnan().tolist() == [True, False, False]
    assert kept[1:].tolist() == [float("inf"), -float("inf")]


def test_int64_wraps_as_on_the_card() -> None:
    assert narrowed(torch.tensor([2**31 + 5, 7])).tolist() == [-2147483643, 7]


def test_bfloat16_is_refused_where_its_loss_is_unknown() -> None:
    with pytest.raises(LayoutError, match="not public"):
        narrowed(torch.ones(3, dtype=torch.bfloat16))


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtype": "float64"}, "Spyre stores no float64"),
        ({"rules": "2025-11"}, "expected one of 2026-06, 2026-09"),
        ({"dim_order": (0, 0)}, "each dim once"),
        ({"dim_order": (-1, 0, 1)}, "each dim once"),
        ({"stride": (1,)}, "as many"),
        ({"size": (2, -3)}, "none negative"),
        ({"arrangement": "ODD"}, "expected one of STANDARD"),
        ({"size": (1,) * 7, "rules": "2026-06"}, "at most 6"),
    ],
)
def test_impossible_layout_is_refused(given: dict[str, Any], text: str) -> None:
    known: dict[str, Any] = {"size": (2, 3), "dtype": "float16", "rules": "2026-09", **given}
    with pytest.raises(LayoutError, match=text):
        StickLayout.of(**known)


def test_rules_of_september_have_no_cap_on_the_rank() -> None:
    assert len(StickLayout.of((2,) * 7, "float16", rules="2026-09").device_size) == 8


def test_other_tensors_and_arrangements_are_not_packed() -> None:
    layout = layout_of((2, 3), "float16")
    with pytest.raises(LayoutError, match=r"pack got float32 \(2, 3\)"):
        layout.pack(torch.zeros(2, 3))
    with pytest.raises(LayoutError, match=r"unpack got float16 \(2, 3\)"):
        layout.unpack(torch.zeros(2, 3).half())
    with pytest.raises(LayoutError, match="not in a tensor"):
        layout.address((2, 0))
    other = StickLayout.of((2, 3), "float16", rules="2026-09", arrangement="EXX2")
    with pytest.raises(LayoutError, match="only STANDARD"):
        other.pack(torch.zeros(2, 3).half())
    assert "STANDARD" in ARRANGEMENTS


# --- what core is offered -----------------------------------------------------------------------


def test_weights_lie_in_sticks_of_outputs() -> None:
    weight = torch.randn(300, 100).half()
    image = pack_weight(weight)
    assert tuple(image.shape) == (5, 100, 64)
    assert image[2, 7, 5] == weight[2 * 64 + 5, 7]
    assert torch.equal(unpack_weight(image, weight.shape), weight)
    assert StickLayout.of((300, 100), "float16", rules="2026-06", dim_order=WEIGHT_ORDER).sticks


def test_cache_pages_are_blocks_of_64_tokens() -> None:
    (pages,) = (layout for layout in LAYOUTS if layout.name == "spyre.kv_pages")
    assert pages.facts["block_size"] == BLOCK_TOKENS == 64
    # In sticks, too, the tokens of a block and head lie together, in the order of the pages.
    cache = torch.randn(3, 64, 2, 64).half()
    image = pack_pages(cache)
    assert tuple(image.shape) == (3, 2, 1, 64, 64)
    assert torch.equal(image.flatten(), cache.permute(0, 2, 1, 3).flatten())
    assert torch.equal(unpack_pages(image, cache.shape), cache)


def test_explanation_is_the_readmes() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    shown = StickLayout.of((5, 100, 150), "float16", rules="2026-09").explain()
    assert f"```\n{shown}\n```" in text
