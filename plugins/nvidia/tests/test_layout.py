"""Weights packed for the matrix units come back byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon_nvidia import layout

FORMS = {
    16: (layout.pack_scaled_mm, layout.unpack_scaled_mm),
    128: (layout.pack_scale_blocks, layout.unpack_scale_blocks),
}
DTYPES = ("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "bfloat16", "float32")


def any_bytes(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    shape = (rows, columns * size)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("multiple", FORMS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 300),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_unpacking_gives_back_every_byte(multiple, rows, columns, dtype, seed):
    pack, unpack = FORMS[multiple]
    weight = any_bytes(rows, columns, getattr(torch, dtype), seed)
    packed = pack(weight)
    assert all(size % multiple == 0 for size in packed.shape)
    assert packed.is_contiguous()
    assert packed.dtype == weight.dtype
    back = unpack(packed, weight.shape)
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


def test_what_is_appended_is_zero():
    packed = layout.pack_scaled_mm(torch.ones(17, 3, dtype=torch.float8_e4m3fn))
    assert packed.float().sum() == 17 * 3


def test_torchs_scaled_matmul_takes_the_packed_weight():
    weight = torch.randn(24, 40).to(torch.float8_e4m3fn)
    x = torch.randn(16, 40).to(torch.float8_e4m3fn)
    packed, one = layout.pack_scaled_mm(weight), torch.ones(())
    padded = layout.pack_scaled_mm(x)
    out = torch._scaled_mm(padded, packed.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    torch.testing.assert_close(out[:16, :24], x.float() @ weight.float().t())


def test_a_shape_that_was_not_packed_is_refused():
    with pytest.raises(ValueError, match=r"unpack got shape \(16, 16\): expected \(32, 16\)"):
        layout.unpack_scaled_mm(torch.zeros(16, 16), (17, 3))
