"""Single checks of the suites, on records made for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from polysilicon.records import Device, Kernel, Layout, Origin, Provided
from polysilicon.selection import Table
from polysilicon.testing.layout_checks import LayoutCase, check_layout
from polysilicon.testing.op_checks import OpCase, check_kernel
from polysilicon.testing.plugin_checks import CHECKS
from polysilicon.testing.subject import DeviceUnderTest, Subject
from polysilicon.testing.tie_checks import check_ties

HERE = __name__
DEVICE = Device(name="acme:x1", kind="acme", arch="a1")


def deep(weight: torch.Tensor) -> torch.Tensor:
    """[N/8, K/4, 2, 4, 2, 2]: tiles of 8 × 4, cut further."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % 4, 0, -n % 8))
    return padded.reshape(padded.shape[0] // 8, 2, 4, padded.shape[1] // 4, 2, 2).permute(
        0, 3, 1, 2, 4, 5
    )


def flat(tiles: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    whole = tiles.permute(0, 2, 3, 1, 4, 5).reshape(tiles.shape[0] * 8, tiles.shape[1] * 4)
    return whole[: shape[0], : shape[1]]


def flat_of_zeros(tiles: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return torch.zeros_like(flat(tiles, shape))


def linear(x: Any, weight: Any, bias: Any, weight_shape: Any) -> Any:
    return torch.nn.functional.linear(x, flat(weight, weight_shape), bias)


def _layout(dims: tuple[str, ...], unpack: str = "flat") -> Layout:
    pack, back = f"{HERE}:deep", f"{HERE}:{unpack}"
    return Layout(name="acme.deep", role="linear_weight", dims=dims, pack=pack, unpack=back)


def _kernel(name: str, **more: Any) -> Kernel:
    more = {"op": "silu_and_mul", "target": f"{HERE}:linear", "device": "acme"} | more
    return Kernel(name=name, **more)


def _subject(*kernels: Kernel) -> Subject:
    origin = Origin(plugin="acme", distribution="polysilicon-acme", version="1")
    entries = tuple(Provided(record=kernel, origin=origin) for kernel in kernels)
    table = Table(
        provided_devices=(Provided(record=DEVICE, origin=origin),),
        layouts={DEVICE.name: ()},
        kernels={DEVICE.name: entries},
    )
    row: Any = SimpleNamespace(name="acme")
    return Subject(row=row, table=table, device=DEVICE, torch_device="cpu", why_not="")


def _wrong(layout: Layout) -> set[str]:
    found = check_layout(LayoutCase(layout=layout, dtype="float32"), "cpu")
    return {finding.check for finding in found if finding.text}


def test_sizes_inside_have_to_multiply_to_the_tile() -> None:
    assert _wrong(_layout(("N/8", "K/4", "2", "4", "2", "2"))) == set()
    assert _wrong(_layout(("N/8", "K/8", "2", "4", "2", "2"))) == {"declared shape"}


def test_layout_that_loses_a_weight_is_named_and_not_the_kernel() -> None:
    layout = _layout(("N/8", "K/4", "2", "4", "2", "2"), "flat_of_zeros")
    kernel = _kernel("linear.acme", op="linear", layouts={"weight": layout.name})
    found = check_kernel(OpCase(kernel=kernel, dtype="float32"), "cpu", (), {layout.name: layout})
    (text,) = {finding.text for finding in found if finding.check == "arguments" and finding.text}
    assert text.startswith("unpack(pack(weight)) of layout acme.deep is not weight")


def test_kernels_that_both_go_first_are_told() -> None:
    one, other = _kernel("silu_and_mul.one"), _kernel("silu_and_mul.other")
    case = OpCase(kernel=one, dtype="float32")
    assert "ties with silu_and_mul.other" in check_ties(case, _subject(one, other)).text
    ranked = _kernel("silu_and_mul.other", rank=1)
    assert check_ties(case, _subject(one, ranked)).text == ""


def test_offline_target_has_to_exist_and_an_op_is_suggested() -> None:
    kernel = _kernel("rmsnorm.acme", op="rmsnorm", offline=f"{HERE}:nowhere")
    found = _subject(kernel)
    (text,) = CHECKS["targets"](DeviceUnderTest, found)
    assert text == f"offline of rmsnorm.acme: {HERE} has no nowhere"
    (text,) = CHECKS["known ops"](DeviceUnderTest, found)
    assert "did you mean 'rms_norm'" in text
