"""Packed: typed layouts, kernels that take them, and LayoutError everywhere else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import layout_kernels as lk
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polysilicon import api
from polysilicon.errors import LayoutError
from polysilicon.packed import Packed, pack
from polysilicon.records import Layout
from polysilicon.selection import bind

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(10, 19, generator=torch.Generator().manual_seed(0))


def test_a_packed_tensor_says_what_it_is(weight: torch.Tensor) -> None:
    packed = api.pack(lk.TILES, weight)
    assert isinstance(packed, api.Packed)
    assert packed.shape == (10, 19)
    assert packed.physical.shape == (3, 3, 4, 8)
    assert (packed.dtype, packed.device) == (torch.float32, weight.device)
    assert packed.nbytes == 3 * 3 * 4 * 8 * 4
    assert packed.padding.elements == 288 - 190
    assert repr(packed) == (
        "Packed(acme.tiles, (10, 19) as (3, 3, 4, 8) float32 on cpu, 1.52× its size)"
    )
    assert torch.equal(packed.unpack(), weight)


def test_a_parameter_packs_into_a_plain_tensor(weight: torch.Tensor) -> None:
    assert type(pack(lk.TURNED, nn.Parameter(weight)).physical) is torch.Tensor


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda x, p: F.linear(x, p), "torch.nn.functional.linear"),
        (lambda x, p: torch.mm(x, p), "got a tensor of shape"),
        (lambda x, p: torch.cat([x, p]), "torch.cat"),
        (lambda x, p: torch.ops.aten.mm.default(x, p), "aten.mm"),
        (lambda x, p: x.copy_(p), "torch.Tensor.copy_"),
        (lambda x, p: x[p], "getitem"),
        (lambda x, p: p[0], "getitem"),
        (lambda x, p: x @ p, "matmul"),
        (lambda x, p: p @ x, "matmul"),
        (lambda x, p: p + 1, "add"),
        (lambda x, p: 2 * p, "mul"),
        (lambda x, p: -p, "neg"),
        (lambda x, p: p == x, "=="),
        (lambda x, p: torch.tensor(p), "len"),
        (lambda x, p: nn.Parameter(p), "Tensor.detach"),
        (lambda x, p: p.t(), "Tensor.t"),
        (lambda x, p: p.data_ptr(), "Tensor.data_ptr"),
        (lambda x, p: p.to("cpu"), "Tensor.to"),
        (lambda x, p: numpy.asarray(p), "array"),
        (lambda x, p: list(p), "iter"),
        (lambda x, p: len(p), "len"),
        (lambda x, p: 1 in p, "contains"),
    ],
    ids=range(22),
)
def test_every_other_use_raises_with_layout_and_remedy(
    use: Any, named: str, weight: torch.Tensor
) -> None:
    with pytest.raises(LayoutError, match=r"packed in layout acme\.tiles.*call \.unpack\(\)") as e:
        use(torch.randn(3, 19), pack(lk.TILES, weight))
    assert named in str(e.value)


def test_protocols_are_asked_in_peace(weight: torch.Tensor) -> None:
    packed = pack(lk.TILES, weight)
    assert not hasattr(packed, "__dlpack__")
    with pytest.raises(AttributeError, match="'Packed' object has no attribute 'colour'"):
        _ = packed.colour


def test_packing_twice_and_into_a_layout_without_pack_is_refused(weight: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"into acme\.turned got .*acme\.tiles.*unpack\(\) first"):
        pack(lk.TURNED, pack(lk.TILES, weight))
    with pytest.raises(LayoutError, match="layout plain has no pack"):
        pack(lk.PLAIN, weight)


def test_what_is_no_plain_tensor_cannot_be_physical(weight: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"got a Parameter for layout acme\.tiles"):
        Packed(nn.Parameter(weight), lk.TILES, weight.shape)


def test_a_packed_tensor_is_immutable(weight: torch.Tensor) -> None:
    packed = pack(lk.TILES, weight)
    for name, value in (("shape", (1,)), ("physical", weight), ("layout", lk.TURNED)):
        with pytest.raises(LayoutError, match=rf"Packed\.{name} of .* can't change"):
            setattr(packed, name, value)
    with pytest.raises(LayoutError, match="can't change"):
        del packed.shape
    assert torch.equal(packed.unpack(), weight)


def test_a_shape_that_the_physical_tensor_has_not_is_refused(weight: torch.Tensor) -> None:
    physical = pack(lk.TILES, weight).physical
    assert torch.equal(Packed(physical, lk.TILES, (10, 19)).unpack(), weight)
    with pytest.raises(LayoutError, match=r"\(99, 19\): layout acme\.tiles makes \(25, 3, 4, 8\)"):
        Packed(physical, lk.TILES, (99, 19))
    with pytest.raises(LayoutError, match=r"\(-10, 19\): expected the logical shape"):
        Packed(physical, lk.TILES, (-10, 19))


@pytest.mark.parametrize(
    ("layout", "tensor", "told"),
    [
        (None, torch.ones(2, 2), "got a NoneType as layout: expected a Layout"),
        ("acme.tiles", torch.ones(2, 2), "got a str as layout"),
        (lk.TILES, [[1.0]], r"acme\.tiles got a list: expected a torch\.Tensor"),
        (lk.TILES, torch.eye(4).to_sparse(), r"tensor of torch\.sparse_coo: .*\.to_dense\(\)"),
    ],
    ids=range(4),
)
def test_what_cannot_be_packed_is_told(layout: Any, tensor: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        pack(layout, tensor)


def test_an_unpack_that_loses_the_shape_is_named(weight: torch.Tensor) -> None:
    bad = Layout(name="acme.bad", role="linear_weight", pack="torch:t", unpack="torch:clone")
    with pytest.raises(LayoutError, match=r"unpack of layout acme\.bad gave shape \(19, 10\)"):
        pack(bad, weight).unpack()


def test_a_deep_copy_is_independent_and_a_pickle_is_refused(weight: torch.Tensor) -> None:
    packed = pack(lk.TILES, weight)
    twin = copy.deepcopy(packed)
    packed.physical.zero_()
    assert torch.equal(twin.unpack(), weight)
    with pytest.raises(LayoutError, match="can't be pickled"):
        pickle.dumps(packed)


@pytest.mark.parametrize(
    "kernel",
    [
        lk.linear("on_tiles", rank=1),
        lk.linear("on_tiles_by_keyword", rank=1),
        lk.opaque("on_tiles", name="linear.opaque_tiles", rank=1),
        lk.opaque("on_tiles_by_keyword", name="linear.opaque_tiles_by_keyword", rank=1),
        lk.linear("on_turned", lk.TURNED, rank=1),
    ],
    ids=lambda kernel: kernel.name,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_gets_the_physical_tensor_and_the_logical_shape(
    kernel: Any, compiled: bool, weight: torch.Tensor
) -> None:
    binding = bind(lk.problem(), device="cpu", table=lk.table(kernel))
    layout = binding.layouts["weight"]
    assert layout.name == kernel.layouts["weight"]
    packed = pack(layout, weight)
    call = binding.fn
    if compiled:
        torch.compiler.reset()  # all cases compile the same code, and there is a limit
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, bias = torch.randn(3, 19), torch.randn(10)
    with torch.no_grad():
        torch.testing.assert_close(call(x, packed, bias), F.linear(x, weight, bias))
        torch.testing.assert_close(call(x=x, weight=packed, bias=None), F.linear(x, weight))


@pytest.mark.parametrize("form", [lk.linear, lk.opaque])
def test_a_cut_list_takes_it_packed_too(form: Any, weight: torch.Tensor) -> None:
    few = form("on_tiles", name="linear.few", rank=2, tokens=(1, 4))
    many = form("on_tiles_by_keyword", name="linear.many", rank=1)
    binding = bind(lk.problem(), device="cpu", table=lk.table(few, many))
    assert [choice.kernel.name for _, choice in binding.cuts] == ["linear.few", "linear.many"]
    packed = pack(lk.TILES, weight)
    with torch.no_grad():
        for tokens in (1, 4, 5):
            x = torch.randn(tokens, 19)
            torch.testing.assert_close(binding.fn(x, packed, None), F.linear(x, weight))


def test_what_a_kernel_takes_packed_it_takes_in_no_other_way(weight: torch.Tensor) -> None:
    call = bind(lk.problem(), device="cpu", table=lk.table(lk.linear("on_tiles", rank=1))).fn
    x = torch.randn(3, 19)
    with pytest.raises(
        LayoutError,
        match=r"kernel linear.on_tiles takes weight in layout acme.tiles and got a plain tensor of "
        r"shape \(10, 19\): pack it",
    ):
        call(x, weight, None)
    with pytest.raises(LayoutError, match=r"got a tensor of shape .* in layout acme\.turned"):
        call(x, pack(lk.TURNED, weight), None)
    with pytest.raises(LayoutError, match="got a NoneType"):
        call(x, None, None)


@pytest.mark.parametrize(
    "kernel", [lk.TORCH, lk.opaque("plain_linear", None, name="linear.opaque_plain")]
)
def test_a_kernel_that_takes_it_plain_refuses_a_packed_one(
    kernel: Any, weight: torch.Tensor
) -> None:
    call = bind(lk.problem(), device="cpu", table=lk.table(kernel, portable=False)).fn
    with torch.no_grad(), pytest.raises(LayoutError, match=r"packed in layout acme\.tiles"):
        call(torch.randn(3, 19), pack(lk.TILES, weight), None)
