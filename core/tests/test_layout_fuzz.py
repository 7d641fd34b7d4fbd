"""Random records, layouts and calls: selection never crashes, packing loses nothing, and a packed
tensor never passes for a plain one or for one of another layout."""

from __future__ import annotations

import string
from typing import Any

import layout_kernels as lk
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import ACME, CORE

from polysilicon import ops
from polysilicon.calling import load_kernel, takes_packed
from polysilicon.errors import LayoutError, RecordError, SelectionError
from polysilicon.explaining import explain
from polysilicon.layouts import Tiled
from polysilicon.packed import pack
from polysilicon.records import DTYPES, Device, Kernel, Layout, Problem, Provided
from polysilicon.selection import Binding, bind, build_table

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # Some random names are of ops or kernels that are not there, which is told once a process.
    pytest.mark.filterwarnings("ignore::polysilicon.errors.PolysiliconWarning"),
]
FEW = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = st.one_of(
    st.sampled_from(["cpu", "acme", "acme:a1", "acme.tiles", "acme.turned", "linear.x", "plain"]),
    st.text(string.ascii_lowercase + string.digits + "_.:-", min_size=1, max_size=4),
    st.text(max_size=3),
)
OPS = st.one_of(st.sampled_from(["linear", "lm_head", "rms_norm", "kv_store"]), NAMES)
TARGETS = st.one_of(
    st.sampled_from(
        ["layout_kernels:plain_linear", "layout_kernels:on_tiles", "no.such:thing", "os:no_such"]
    ),
    st.text(max_size=4),
)
LAYOUTS = st.one_of(
    st.just({}),
    st.sampled_from([{"weight": "acme.tiles"}, {"weight": "acme.turned"}, {"bias": "acme.tiles"}]),
    st.dictionaries(st.sampled_from(["weight", "x", "?"]), NAMES, max_size=2),
)
SPANS = st.tuples(st.integers(-1, 40), st.integers(0, 1 << 21))
FACTS = st.dictionaries(
    st.sampled_from(["in", "out", "bias", "hidden", "dtypes", "no_such"]),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    max_size=3,
)
KINDS = st.sampled_from(sorted(DTYPES))


def _picky(problem: Problem) -> str | None:
    return None if problem.fact("in") else "in is not stated"


def _raising(problem: Problem) -> str | None:
    raise ZeroDivisionError("in supports")


@st.composite
def _records(draw: st.DrawFn, record: Any, **fields: Any) -> Any:
    """A record of random fields; None where it refuses them."""
    try:
        return record(**{name: draw(strategy) for name, strategy in fields.items()})
    except RecordError:
        return None


DEVICES = _records(Device, name=NAMES, kind=NAMES, arch=st.sampled_from(["", "a1"]), facts=FACTS)
LAYOUT_RECORDS = _records(
    Layout,
    name=NAMES,
    role=st.sampled_from(["linear_weight", "embedding", "kv_block", "no_such"]),
    pack=st.one_of(st.none(), TARGETS),
    unpack=st.one_of(st.none(), TARGETS),
    facts=FACTS,
)
KERNELS = _records(
    Kernel,
    op=OPS,
    name=NAMES,
    target=TARGETS,
    device=st.one_of(st.just("*"), NAMES),
    dtypes=st.frozensets(KINDS, max_size=2),
    supports=st.sampled_from([None, None, _picky, _raising]),
    rank=st.integers(-2, 2),
    form=st.sampled_from(["traceable", "opaque", "no_such"]),
    tokens=st.one_of(st.none(), SPANS),
    fake=st.sampled_from([None, "layout_kernels:fake"]),
    layouts=LAYOUTS,
)
PROBLEMS = _records(Problem, op=OPS, dtype=KINDS, tokens=SPANS, facts=FACTS)


@FEW
@given(
    device=DEVICES,
    layouts=st.lists(LAYOUT_RECORDS, max_size=4),
    kernels=st.lists(KERNELS, max_size=8),
    problem=PROBLEMS,
    portable=st.booleans(),
    plain=st.sampled_from([{}, {"weight": "it is shared"}]),
)
def test_selection_answers_or_says_why_not(
    device: Device | None,
    layouts: list[Layout | None],
    kernels: list[Kernel | None],
    problem: Problem | None,
    portable: bool,
    plain: dict[str, str],
) -> None:
    if device is None or problem is None:
        return
    named = {k.name: Provided(record=k, origin=ACME) for k in kernels if k is not None}
    core = [Provided(record=lk.TORCH, origin=CORE)] if portable else []
    table = build_table(
        devices=[Provided(record=device, origin=ACME)],
        layouts={
            device.name: list(
                {x.name: Provided(record=x, origin=ACME) for x in layouts if x}.values()
            )
        },
        kernels={device.name: [*named.values(), *core]},
    )
    assert len(table.fingerprint) == 16
    for call in (
        lambda: bind(problem, device=device, table=table, plain=plain),
        lambda: explain(problem, device=device, table=table).as_dict(),
    ):
        try:
            answer = call()
        except (SelectionError, RecordError, ValueError):
            continue
        if isinstance(answer, Binding):
            _holds_together(answer, problem, plain)


_WORKING = st.tuples(
    st.sampled_from(
        [("plain_linear", None), ("on_tiles", lk.TILES), ("on_turned", lk.TURNED)],
    ),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([None, (1, 4), (1, 16), (5, 16), (5, 1 << 20), (17, 1 << 20)]),
    st.sampled_from(["*", "cpu", "cpu:x86_64", "other"]),
)


@FEW
@given(
    drawn=st.lists(_WORKING, max_size=7),
    refused=st.sets(st.integers(0, 6), max_size=3),
    portable=st.booleans(),
    tokens=st.sampled_from([1, 4, 5, 40]),
)
def test_whatever_is_chosen_computes_the_product(
    drawn: list[Any], refused: set[int], portable: bool, tokens: int
) -> None:
    kernels = [
        (lk.opaque if opaque else lk.linear)(
            function,
            layout,
            name=f"linear.{function}_{place}_{int(opaque)}",
            rank=rank,
            tokens=span,
            device=device,
        )
        for place, ((function, layout), opaque, rank, span, device) in enumerate(drawn)
    ]
    unwanted = {kernel.name for place, kernel in enumerate(kernels) if place in refused}
    try:
        binding = bind(
            lk.problem(),
            device="cpu",
            table=lk.table(*kernels, portable=portable),
            judge=lambda provided, *_: "no" if provided.record.name in unwanted else None,
        )
    except SelectionError:
        return
    _holds_together(binding, lk.problem(), {})
    assert not unwanted & {choice.kernel.name for _, choice in binding.cuts}
    weight, x = torch.randn(10, 19), torch.randn(tokens, 19)
    packed = pack(binding.layouts["weight"], weight) if binding.layouts else weight
    with torch.no_grad():
        torch.testing.assert_close(binding.fn(x, packed, None), x @ weight.t())


def _holds_together(binding: Binding, problem: Problem, plain: dict[str, str]) -> None:
    assert binding.cuts[-1][0] == problem.tokens[1]
    for _, choice in binding.cuts:
        assert dict(choice.kernel.layouts) == {n: x.name for n, x in binding.layouts.items()}
        assert not set(choice.kernel.layouts) & set(plain)
    assert all(candidate.reason for candidate in binding.candidates)


# --- packing -------------------------------------------------------------------------------------

WIDTHS = {
    1: (torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    2: (torch.int16, torch.bfloat16, torch.float16),
    4: (torch.int32, torch.float32),
    8: (torch.int64, torch.float64),
}
_DRAWN: dict[str, Tiled] = {}


def pack_drawn(logical: torch.Tensor) -> torch.Tensor:
    return _DRAWN["layout"].pack(logical)


def unpack_drawn(physical: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return _DRAWN["layout"].unpack(physical, shape)


@st.composite
def _tiled(draw: st.DrawFn) -> Tiled:
    dims = ("N", "K", "L")[: draw(st.integers(1, 3))]
    tiled = draw(st.lists(st.sampled_from(dims), unique=True))
    return Tiled(
        dims=dims,
        tiles={dim: draw(st.integers(1, 9)) for dim in tiled},
        order=tuple(draw(st.permutations(dims))),
        inner=tuple(draw(st.permutations(tiled))),
        blocked=draw(st.booleans()),
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    flat = x.new_empty(x.numel()).copy_(x.reshape(-1))  # a dim of size one may have any stride
    return flat if x.dtype == torch.bool else flat.view(torch.uint8)


@FEW
@given(
    tiled=_tiled(),
    dtype=st.sampled_from([d for own in WIDTHS.values() for d in own]),
    data=st.data(),
)
def test_packing_loses_no_bit(tiled: Tiled, dtype: torch.dtype, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(0, 12)) for _ in tiled.dims)
    seed = data.draw(st.integers(0, 1 << 30))
    raw = torch.randint(
        256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed)
    )
    raw = raw.to(torch.uint8)
    # Every bit pattern, NaNs with payload among them.
    x = raw[..., 0] > 127 if dtype == torch.bool else raw.view(dtype).squeeze(-1)
    _DRAWN["layout"] = tiled
    layout = Layout(
        name="acme.drawn",
        role="linear_weight",
        dims=tiled.physical_dims,
        pack="test_layout_fuzz:pack_drawn",
        unpack="test_layout_fuzz:unpack_drawn",
    )
    packed = pack(layout, x)
    assert tuple(packed.physical.shape) == tiled.physical_shape(shape)
    assert packed.padding.elements == tiled.padding(shape).elements
    back = packed.unpack()
    assert (back.dtype, tuple(back.shape)) == (dtype, shape)
    assert torch.equal(_bits(back), _bits(x))


@FEW
@given(
    takes=st.sampled_from([None, lk.TILES, lk.TURNED]),
    given_in=st.sampled_from([None, lk.TILES, lk.TURNED]),
    opaque=st.booleans(),
    by_keyword=st.booleans(),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_a_packed_tensor_passes_only_where_its_layout_is_taken(
    takes: Layout | None,
    given_in: Layout | None,
    opaque: bool,
    by_keyword: bool,
    shape: tuple[int, int],
) -> None:
    functions = {None: "plain_linear", lk.TILES.name: "on_tiles", lk.TURNED.name: "on_turned"}
    function = functions[takes.name if takes else None]
    make = lk.opaque if opaque else lk.linear
    kernel = make(function, takes, name=f"linear.fuzz_{function}_{int(opaque)}")
    call = takes_packed(ops.get("linear"), kernel.name, kernel.layouts, load_kernel(kernel))
    plain, x = torch.randn(shape), torch.randn(3, shape[1])
    weight = plain if given_in is None else pack(given_in, plain)
    arguments = {"x": x, "weight": weight, "bias": None}
    with torch.no_grad():
        if takes is given_in:
            result = call(**arguments) if by_keyword else call(*arguments.values())
            torch.testing.assert_close(result, x @ plain.t())
            return
        with pytest.raises(LayoutError, match=r"layout acme\.|packed in layout"):
            call(**arguments) if by_keyword else call(*arguments.values())
