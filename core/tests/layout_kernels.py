"""Layouts and linear kernels on them for the tests: 4 × 8 tiles, and the transposed weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tables import ACME, CORE, CPU
from torch.nn import functional as F

from polysilicon.defaults import KERNELS
from polysilicon.layouts import Tiled
from polysilicon.records import Kernel, Layout, Problem, Provided
from polysilicon.selection import build_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.records import Device
    from polysilicon.selection import Table

_TILED = Tiled(dims=("N", "K"), tiles={"N": 4, "K": 8})

TILES = Layout(
    name="acme.tiles",
    role="linear_weight",
    dims=_TILED.physical_dims,
    pack="layout_kernels:pack_tiles",
    unpack="layout_kernels:unpack_tiles",
)
TURNED = Layout(
    name="acme.turned",
    role="linear_weight",
    dims=("K", "N"),
    pack="layout_kernels:pack_turned",
    unpack="layout_kernels:unpack_turned",
)
PLAIN = Layout(name="plain", role="linear_weight", dims=("N", "K"))
TORCH = next(kernel for kernel in KERNELS if kernel.name == "linear.torch")


def pack_tiles(logical: Tensor) -> Tensor:
    return _TILED.pack(logical)


def unpack_tiles(physical: Tensor, shape: Sequence[int]) -> Tensor:
    return _TILED.unpack(physical, shape)


def pack_turned(logical: Tensor) -> Tensor:
    return logical.t().contiguous()


def unpack_turned(physical: Tensor) -> Tensor:
    return physical.t().contiguous()


def unpack_turned_wrong(physical: Tensor) -> Tensor:
    return physical.t().flip(0).contiguous()


def pack_raising(logical: Tensor) -> Tensor:
    raise RuntimeError("no room for tiles")


def on_tiles(
    x: Tensor,
    weight: Tensor,  # [N/4, K/8, 4, 8]
    bias: Tensor | None,
    weight_shape: Sequence[int],
) -> Tensor:
    """x · weightᵀ + bias, tile column by tile column."""
    out, width = weight_shape
    padded = F.pad(x, (0, weight.shape[1] * 8 - width))
    rows = weight.permute(0, 2, 1, 3).reshape(weight.shape[0] * 4, -1)
    y = F.linear(padded, rows)[..., :out].contiguous()
    return y if bias is None else y + bias


def on_tiles_by_keyword(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, weight_shape: Sequence[int]
) -> Tensor:
    return on_tiles(x, weight, bias, weight_shape)


def on_turned(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_shape: Sequence[int]
) -> Tensor:
    assert tuple(weight.shape) == tuple(weight_shape)[::-1]
    return F.linear(x, weight.t(), bias)


def wrong_on_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_shape: Sequence[int]
) -> Tensor:
    return on_tiles(x, weight, bias, weight_shape) * 1.01


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def plain_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, weight_shape: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_shape[0])


def linear(function: str, layout: Layout | None = TILES, **more: Any) -> Kernel:
    """A kernel of linear whose target is that function; its weight in `layout`."""
    more.setdefault("name", f"linear.{function}")
    layouts = {} if layout is None else {"weight": layout.name}
    return Kernel(op="linear", target=f"layout_kernels:{function}", layouts=layouts, **more)


def opaque(function: str, layout: Layout | None = TILES, **more: Any) -> Kernel:
    """The same as an opaque kernel."""
    shape = "plain_fake" if layout is None else "fake"
    return linear(function, layout, form="opaque", fake=f"layout_kernels:{shape}", **more)


def table(
    *kernels: Kernel,
    layouts: Sequence[Layout] = (TILES, TURNED, PLAIN),
    device: Device = CPU,
    portable: bool = True,
) -> Table:
    """One device with these kernels and layouts of the acme plugin, and core's kernels last."""
    core = [kernel for kernel in KERNELS if kernel.device == "*"] if portable else []
    entries = [Provided(record=record, origin=ACME) for record in kernels]
    entries += [Provided(record=record, origin=CORE) for record in core]
    return build_table(
        devices=[Provided(record=device, origin=CORE)],
        layouts={device.name: [Provided(record=layout, origin=ACME) for layout in layouts]},
        kernels={device.name: entries},
    )


def problem(low: int = 1, high: int = 1 << 20, **facts: Any) -> Problem:
    """A problem of linear for a range of token counts."""
    facts = {"in": 19, "out": 10, "bias": False} | facts
    return Problem(op="linear", dtype="float32", tokens=(low, high), facts=facts)
