"""rms_norm on sticks: no padding is read as data, whatever the row's length."""

from __future__ import annotations

import pytest
import torch

from polysilicon_spyre.division import divide_rows, rows_per_pass
from polysilicon_spyre.kernels import rms_norm as module
from polysilicon_spyre.kernels.rms_norm import fake, rms_norm


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
# One of each, nothing aligned, one off a stick of 32 and of 64, whole sticks, no row.
@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 1), (7, 100), (3, 33), (2, 65), (64, 128), (0, 48)]
)
def test_no_padding_is_read_as_data(rows: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
    y = rms_norm(x, weight, 1e-6)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), _reference(x, weight, 1e-6), rtol=bound, atol=bound)


def test_a_seeded_padding_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, *_: self)
    assert bool(rms_norm(torch.ones(2, 100), None, 1e-6).isnan().all())


def test_weight_of_another_width_lies_beside_its_row() -> None:
    # Sticks of 64 in x and of 32 in the weight: 100 elements are two and four of them.
    x, weight = torch.randn(3, 100).to(torch.bfloat16), torch.randn(100)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6).double(), _reference(x, weight, 1e-6), rtol=2**-7, atol=2**-7
    )


def test_rows_beyond_one_pass_go_into_further_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_per_pass(64, 64) == 32768
    x = torch.randn(2, 5, 48)
    whole = rms_norm(x, None, 1e-6)
    monkeypatch.setattr(module, "rows_per_pass", lambda columns, depth: 3)
    assert torch.equal(rms_norm(x, None, 1e-6), whole)


def test_whole_rows_go_to_as_many_cores_as_divide_them() -> None:
    # The front end splits 128 rows over 32 cores; 33 have no divisor between 11 and 32.
    assert [len(divide_rows(rows)) for rows in (128, 33, 1, 37)] == [32, 11, 1, 1]


def test_shape_function_keeps_the_shape() -> None:
    assert fake(torch.empty(2, 3, 48), None, 1e-6).shape == (2, 3, 48)
