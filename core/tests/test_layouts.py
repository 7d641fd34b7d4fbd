"""The layout algebra: pack and unpack are inverse for any shape, and padding holds no data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.errors import RecordError
from polysilicon.layouts import Tiled

DIMS = ("A", "B", "C")


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Tiled, tuple[int, ...]]:
    dims = DIMS[: draw(st.integers(1, 3))]
    tiled = draw(st.lists(st.sampled_from(dims), unique=True))
    layout = Tiled(
        dims=dims,
        tiles={dim: draw(st.integers(1, 5)) for dim in tiled},
        order=tuple(draw(st.permutations(dims))),
        inner=tuple(draw(st.permutations(tiled))),
        blocked=draw(st.booleans()),
        fill=float("nan"),
    )
    return layout, tuple(draw(st.integers(0, 9)) for _ in dims)


@settings(max_examples=300, deadline=None)
@given(_cases())
def test_unpack_undoes_pack_and_sizes_are_as_reported(case: tuple[Tiled, tuple[int, ...]]) -> None:
    layout, shape = case
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    packed = layout.pack(x)
    assert tuple(packed.shape) == layout.physical_shape(shape)
    assert len(layout.physical_dims) == packed.dim()
    assert packed.is_contiguous()
    assert torch.equal(layout.unpack(packed, shape), x)
    # The fill stands exactly where no data is.
    assert int(packed.isnan().sum()) == layout.padding(shape).elements


def test_tiles_lie_together_in_memory() -> None:
    layout = Tiled(dims=("N", "K"), tiles={"N": 2, "K": 2})
    assert layout.physical_dims == ("N/2", "K/2", "2", "2")
    packed = layout.pack(torch.arange(16).reshape(4, 4))
    assert packed[0, 1].tolist() == [[2, 3], [6, 7]]


def test_inner_order_transposes_inside_a_tile() -> None:
    layout = Tiled(dims=("N", "K"), tiles={"N": 2, "K": 2}, inner=("K", "N"))
    assert layout.pack(torch.arange(16).reshape(4, 4))[0, 1].tolist() == [[2, 6], [3, 7]]


def test_padded_layout_keeps_its_dims() -> None:
    layout = Tiled(dims=("N", "K"), tiles={"K": 8}, blocked=False)
    assert layout.pack(torch.ones(3, 5)).shape == (3, 8)
    assert layout.padding((3, 5)).overhead == pytest.approx(8 / 5)


def test_plain_layout_is_the_identity() -> None:
    layout, x = Tiled(dims=("N", "K")), torch.randn(3, 5)
    assert torch.equal(layout.pack(x), x)
    assert layout.padding((3, 5)).elements == 0


def test_empty_tensor_wastes_nothing() -> None:
    assert Tiled(dims=("N", "K"), tiles={"N": 4}).padding((0, 5)).overhead == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_any_dtype_goes_round(dtype: torch.dtype) -> None:
    layout = Tiled(dims=("N", "K"), tiles={"N": 4, "K": 3})
    x = torch.ones(5, 7).to(dtype)
    assert torch.equal(layout.unpack(layout.pack(x), (5, 7)).float(), x.float())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dims": ("N", "N")}, "expected each dim once"),
        ({"dims": ("N",), "order": ("K",)}, "expected each dim once"),
        ({"dims": ("N",), "tiles": {"K": 2}}, "are no dims of it"),
        ({"dims": ("N",), "tiles": {"N": 0}}, "expected 1 or more"),
        ({"dims": ("N", "K"), "tiles": {"N": 2}, "inner": ("K",)}, "expected each tiled dim"),
    ],
)
def test_layout_that_does_not_hold_together_is_refused(more: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Tiled(**more)


def test_wrong_shapes_are_refused_with_the_expected_one() -> None:
    layout = Tiled(dims=("N", "K"), tiles={"N": 2})
    with pytest.raises(ValueError, match=r"got shape \(3,\): one size a dim"):
        layout.pack(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"expected \(2, 5, 2\) \(N/2 K 2\) for a logical \(3, 5\)"
    ):
        layout.unpack(torch.ones(3, 5), (3, 5))
