"""prepare() packs weights: one copy of each, and everything that reads one sees logical values."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import layout_kernels as lk
import pytest
import torch
from tables import CHIP
from torch import nn
from torch.nn import functional as F

from polysilicon.errors import LayoutError, PolysiliconWarning
from polysilicon.layers import GatedMLP, Linear
from polysilicon.layers.linear import MergedLinear
from polysilicon.layers.packed_weight import PackedParameter
from polysilicon.packed import pack
from polysilicon.prepare import prepare


@pytest.fixture(autouse=True)
def _without_proof(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")


TILES = lk.table(lk.linear("on_tiles", rank=1))
TURNED = lk.table(lk.linear("on_turned", lk.TURNED, rank=1))
NOWHERE = lk.table()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


class Model(nn.Module):
    """A linear layer, a transposed one, and a gated MLP, whose gate and up are merged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Linear(_parameter(21, 19), _parameter(21))
        self.turned = Linear(_parameter(21, 10), transposed=True)
        gate, up, down = (Linear(_parameter(*shape)) for shape in ((13, 10), (13, 10), (10, 13)))
        self.mlp = GatedMLP(gate, up, down, "silu")

    def forward(self, x: torch.Tensor) -> Any:
        return self.mlp(self.turned(self.first(x)))


X = torch.randn(5, 19, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X)  # type: ignore[no-any-return]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def layouts(model: nn.Module) -> list[str]:
    """The layout of every packed weight."""
    held = [getattr(module, "packed_weight", None) for module in model.modules()]
    return [weight.layout.name for weight in held if weight is not None]


@pytest.fixture(params=[TILES, TURNED], ids=["tiles", "turned"])
def packed(request: pytest.FixtureRequest) -> tuple[Model, dict[str, torch.Tensor], torch.Tensor]:
    """A prepared model, its state dict and results from before."""
    model = Model()
    before, results = state(model), run(model)
    prepare(model, table=request.param)
    assert len(layouts(model)) == 4
    return model, before, results


Packed = tuple[Model, dict[str, torch.Tensor], torch.Tensor]


def test_results_and_state_dict_stay_and_the_plain_memory_goes(packed: Packed) -> None:
    model, before, results = packed
    torch.testing.assert_close(run(model), results)
    assert_state(model, before)
    own = [p for p in model.parameters() if not isinstance(p, PackedParameter)]
    assert [tuple(p.shape) for p in own] == [(21,)]
    merged = model.mlp.gate_up
    assert merged.merged_weight is None
    assert merged.is_merged()
    placeholders = [p for p in model.parameters() if isinstance(p, PackedParameter)]
    with torch._C.DisableTorchFunctionSubclass():
        assert all(p.untyped_storage().nbytes() == 4 for p in placeholders)


def test_weights_are_packed_and_freed_one_layer_at_a_time(monkeypatch: Any) -> None:
    model, gone = nn.Sequential(*(Linear(_parameter(8, 8)) for _ in range(3))), []

    def noting(layout: Any, matrix: torch.Tensor) -> Any:
        gone.append(sum(isinstance(p, PackedParameter) for p in model.parameters()))
        return pack(layout, matrix)

    monkeypatch.setattr("polysilicon.layers.packed_weight.pack", noting)
    prepare(model, table=TILES)
    assert gone == [0, 1, 2]


def test_parameters_stay_the_same_objects() -> None:
    model = Model()
    before = dict(model.named_parameters())
    prepare(model, table=TILES)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    for module in model.modules():
        if isinstance(module, Linear):
            module.unpack()
    model.mlp.gate_up.unpack()
    assert all(type(parameter) is nn.Parameter for parameter in before.values())


def test_rows_and_bindings_say_what_lies_how() -> None:
    prepared = prepare(Model(), table=TILES)
    rows = {(row.kernel, row.reason): row for row in prepared.rows if row.op == "linear"}
    assert rows["linear.on_tiles", "highest rank (1)"].as_dict()["layouts"] == {
        "weight": "acme.tiles"
    }
    part = rows[
        "linear.torch",
        "the only one that fits; weight stays plain: its rows lie in a merged product",
    ]
    assert (part.uses, part.layouts) == (2, {})
    assert prepared.fingerprint != prepare(Model(), table=TURNED).fingerprint


def test_compiled_model_is_one_graph(packed: Packed) -> None:
    model, _, results = packed
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), results)


def test_opaque_kernels_compile_too() -> None:
    model = Model()
    results = run(model)
    few = lk.opaque("on_tiles", name="linear.opaque_few", rank=2, tokens=(1, 4))
    prepare(model, table=lk.table(few, lk.linear("on_tiles", rank=1)))
    torch.compiler.reset()
    torch.testing.assert_close(
        run(torch.compile(model, fullgraph=True, backend="aot_eager")), results
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.clone(),
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.t().t(),
        lambda w: w + 0,
        lambda w: w.view(-1).reshape(w.shape),
        lambda w: torch.stack([w])[0],
        lambda w: F.linear(torch.eye(w.shape[1]), w).t(),
        lambda w: torch.ops.aten.clone.default(w),
        lambda w: torch.tensor(w.detach().numpy()),
        lambda w: torch.stack([*w]),
        lambda w: nn.Parameter(w.detach()),
        lambda w: pickle.loads(pickle.dumps(w.detach())),
        lambda w: copy.deepcopy(w.data),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("name", ["first", "turned", "mlp.up_proj"])
def test_whoever_reads_a_weight_gets_its_logical_value(
    read: Any, name: str, packed: Packed
) -> None:
    model, before, _ = packed
    weight = model.get_submodule(name).weight
    assert isinstance(weight, PackedParameter)
    with torch.no_grad():
        assert torch.equal(read(weight), before[f"{name}.weight"])


def test_facts_about_a_weight_cost_no_unpacking(packed: Packed, monkeypatch: Any) -> None:
    model, before, _ = packed
    monkeypatch.setattr("polysilicon.packed.Packed.unpack", None)
    weight = model.first.weight
    assert weight.shape == weight.size() == before["first.weight"].shape
    assert (weight.dtype, weight.device, weight.is_meta) == (torch.float32, X.device, False)
    assert (weight.numel(), weight.dim(), len(weight)) == (21 * 19, 2, 21)
    assert weight.requires_grad
    assert repr(weight).startswith("PackedParameter(acme.")
    assert (model.first.in_features, model.first.out_features) == (19, 21)


def test_addresses_of_a_packed_weight_are_refused(packed: Packed) -> None:
    for ask in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
        with pytest.raises(LayoutError, match=r"PackedParameter\(acme\..*no memory of its own"):
            ask(packed[0].first.weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda w, value: w.copy_(value),
        lambda w, value: w.__setitem__(slice(None), value),
        lambda w, value: w.zero_().add_(value),
        lambda w, value: torch.add(value, 0, out=w),
        lambda w, value: torch.ops.aten.copy_.default(w, value),
        lambda w, value: w.__imul__(0).__iadd__(value),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("name", ["first", "turned", "mlp.up_proj"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_reaches_the_packed_weight_in_place(
    write: Any, name: str, inference: bool, packed: Packed
) -> None:
    model, before, _ = packed
    weight = model.get_submodule(name).weight
    address = weight.packed_weight.packed.physical.data_ptr()
    value = torch.randn(before[f"{name}.weight"].shape)
    with torch.inference_mode(inference), torch.no_grad():
        write(weight, value)
    assert isinstance(weight, PackedParameter)
    assert weight.packed_weight.packed.physical.data_ptr() == address
    assert_state(model, before | {f"{name}.weight": value})
    twin = Model()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(run(model), run(twin))


def _add_to_data(weight: Any) -> None:
    weight.data += 1.0


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.zero_(),
        lambda w: w.detach().zero_(),
        _add_to_data,
        lambda w: w[3].zero_(),
        lambda w: w.t().zero_(),
        lambda w: w.data[0].view(-1).t().fill_(1),
        lambda w: w.data.__setitem__(0, 1.0),
        lambda w: [row.zero_() for row in w],
        lambda w: [row.zero_() for row in w.data],
        lambda w: w.split(1)[0].zero_(),
        lambda w: torch.add(w, 1, out=w.data),
        lambda w: torch._foreach_mul_([w.data], 2),
        lambda w: F.relu(w.data, inplace=True),
        lambda w: nn.init.normal_(w.data),
        lambda w: nn.init.zeros_(w.detach()),
        lambda w: setattr(w.data, "data", torch.zeros(21, 19)),
        lambda w: w.view(-1)[:5].fill_(0),
    ],
    ids=range(17),
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_cannot_be_written_through_raises(write: Any, mode: Any, packed: Packed) -> None:
    model, before, results = packed
    model.requires_grad_(False)
    with mode(), pytest.raises(LayoutError, match=r"copy of a packed weight.*weight\.copy_"):
        write(model.first.weight)
    assert_state(model, before)
    torch.testing.assert_close(run(model), results)


def test_a_state_dict_and_numpy_see_a_copy_that_cannot_be_written(packed: Packed) -> None:
    model, before, _ = packed
    with pytest.raises(LayoutError, match="zero_ would write to a copy"):
        model.state_dict()["first.weight"].zero_()
    with pytest.raises(ValueError, match="read-only"):
        model.first.weight.detach().numpy()[0] = 0
    assert_state(model, before)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)["first.weight"]) is torch.Tensor
    assert type(model.first.weight.data.clone().zero_()) is torch.Tensor


def test_an_assignment_to_data_is_told_by_the_next_forward(packed: Packed) -> None:
    model, before, results = packed
    model.first.weight.data = torch.zeros(21, 19)
    assert type(model.first.weight) is nn.Parameter
    with pytest.raises(LayoutError, match=r"given other memory .*call prepare\(\) again"):
        run(model)
    model.first.weight.data = before["first.weight"]
    prepare(model, table=TILES)
    torch.testing.assert_close(run(model), results)


def test_gradients_of_a_packed_weight_raise(packed: Packed) -> None:
    model, _, results = packed
    with pytest.raises(LayoutError, match=r"a gradient was wanted of .* packed in layout acme\."):
        model(X)
    with pytest.raises(LayoutError, match="a gradient was wanted"):
        model.first.weight.sum().backward()
    with pytest.raises(LayoutError, match="a gradient was wanted"):
        model.mlp.gate_up(torch.randn(3, 10))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = X.clone().requires_grad_()
    y = model(x)
    torch.testing.assert_close(y, results)
    y.sum().backward()
    assert x.grad is not None


def test_loaded_weights_reach_the_packed_ones(packed: Packed) -> None:
    model, _, _ = packed
    kept, other = layouts(model), Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(0, 0.2)
    for assign in (False, True):
        model.load_state_dict(state(other), assign=assign)
        assert_state(model, state(other))
        assert layouts(model) == kept
        torch.testing.assert_close(run(model), run(other))
        with torch.no_grad():
            other.first.weight.mul_(2)


def test_a_state_dict_of_packed_weights_can_be_assigned_and_trained(packed: Packed) -> None:
    twin = Model()
    twin.load_state_dict(packed[0].state_dict(), assign=True)
    assert type(twin.first.weight) is nn.Parameter
    twin(X).sum().backward()
    assert twin.first.weight.grad is not None
    torch.optim.SGD(twin.parameters(), lr=0.1).step()


def test_a_deep_copy_stays_packed_and_independent(packed: Packed) -> None:
    model, before, results = packed
    twin = copy.deepcopy(model)
    assert layouts(twin) == layouts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_state(twin, before)
    torch.testing.assert_close(run(twin), results)


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_pickled_model_is_plain_and_unprepared(way: str, packed: Packed) -> None:
    model, before, results = packed
    buffer = io.BytesIO()
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    assert layouts(twin) == []
    assert_state(twin, before)
    torch.testing.assert_close(run(twin), results)
    prepare(twin, table=TILES)
    torch.testing.assert_close(run(twin), results)


@pytest.mark.parametrize("order", ["parts first", "product first"])
def test_moving_to_another_dtype_makes_weights_plain_and_says_so(
    order: str, packed: Packed
) -> None:
    model, before, _ = packed
    if order == "product first":
        modules = model.mlp._modules
        model.mlp._modules = {"gate_up": modules["gate_up"], **modules}
    with pytest.warns(PolysiliconWarning, match=r"moved to float64.*prepare\(\) again"):
        model.double()
    assert layouts(model) == []
    assert model.mlp.gate_up.is_merged()
    expected = {name: value.double() for name, value in before.items()}
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    twin = Model().double()
    with torch.no_grad():
        torch.testing.assert_close(model(X.double()), twin(X.double()))


def test_a_move_to_where_it_lies_keeps_it_packed(packed: Packed) -> None:
    model, before, results = packed
    kept = layouts(model)
    model.to("cpu")
    assert layouts(model) == kept
    assert_state(model, before)
    torch.testing.assert_close(run(model), results)


@pytest.mark.parametrize("table", [TILES, TURNED, NOWHERE], ids=["tiles", "turned", "plain"])
def test_preparing_again_lays_weights_out_anew(table: Any, packed: Packed) -> None:
    model, before, results = packed
    prepare(model, table=table)
    wanted = {id(TILES): "acme.tiles", id(TURNED): "acme.turned"}.get(id(table))
    assert set(layouts(model)) == ({wanted} if wanted else set())
    assert_state(model, before)
    torch.testing.assert_close(run(model), results)


def test_preparing_for_another_device_unpacks() -> None:
    model = Model()
    results = run(model)
    prepare(model, table=TILES)
    chip = lk.table(lk.linear("on_turned", lk.TURNED, rank=1), device=CHIP)
    prepare(model, CHIP, table=chip)
    assert set(layouts(model)) == {"acme.turned"}
    torch.testing.assert_close(run(model), results)


def test_a_new_parameter_takes_a_packed_ones_place(packed: Packed) -> None:
    model, _, _ = packed
    model.first.weight = nn.Parameter(torch.zeros(21, 19))
    assert model.first.packed_weight is None
    assert not run(nn.Sequential(model.first))[:, :].sub(model.first.bias).any()


def test_merging_packed_parts_is_refused(packed: Packed) -> None:
    with pytest.raises(LayoutError, match=r"lies packed in acme\..*call unpack\(\)"):
        MergedLinear([packed[0].first, packed[0].first])


# --- what is not packed --------------------------------------------------------------------------


def _notes(model: nn.Module) -> set[str]:
    return {one.note for one in prepare(model, table=TILES).bound if one.note}


def test_a_shared_parameter_stays_plain() -> None:
    model = nn.Module()
    model.a = Linear(_parameter(8, 8))
    model.b = Linear(model.a.weight)
    model.c = Linear(_parameter(8, 8))
    assert _notes(model) == {"weight stays plain: it is shared: a.weight and b.weight"}
    assert len(layouts(model)) == 1


def test_a_weight_in_memory_that_another_sees_stays_plain() -> None:
    model, whole = nn.Module(), torch.randn(12, 8)
    model.a = Linear(nn.Parameter(whole[:8]))
    model.b = Linear(nn.Parameter(whole[4:]))
    assert _notes(model) == {
        "weight stays plain: it is shared: a.weight and b.weight lie in the same memory"
    }


def test_neighbours_in_one_memory_are_packed() -> None:
    model, whole = nn.Module(), torch.randn(16, 8)
    model.a = Linear(nn.Parameter(whole[:8]))
    model.b = Linear(nn.Parameter(whole[8:]))
    assert _notes(model) == set()
    assert len(layouts(model)) == 2


def test_a_merged_product_with_a_shared_part_stays_plain() -> None:
    model = Model()
    model.other = Linear(model.mlp.up_proj.weight)
    notes = _notes(model)
    assert any("shared: mlp.up_proj.weight and other.weight" in note for note in notes)
    assert model.mlp.gate_up.packed_weight is None


def test_a_weight_that_is_no_parameter_stays_plain() -> None:
    model = nn.Sequential(Linear(torch.randn(8, 8)))
    assert _notes(model) == {
        "weight stays plain: it is a Tensor, and only a plain Parameter is packed"
    }


def test_a_kernel_that_supports_less_leaves_the_rest_plain() -> None:
    picky = lk.linear(
        "on_tiles", rank=1, supports=lambda p: None if p.fact("in") == 19 else "in is not 19"
    )
    model = Model()
    results = run(model)
    prepare(model, table=lk.table(picky))
    assert layouts(model) == ["acme.tiles"]
    torch.testing.assert_close(run(model), results)


def test_a_wrong_kernel_is_refused_by_proof_and_nothing_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "on")
    device = replace(CHIP, simulated=True)
    model = Model()
    wrong = lk.linear("wrong_on_tiles", rank=1)
    prepared = prepare(model, device, table=lk.table(wrong, device=device))
    assert layouts(model) == []
    reasons = [c.reason for one in prepared.bindings for c in one.candidates]
    assert any(reason.startswith("refused by proof, wrong on") for reason in reasons)


def test_a_right_kernel_passes_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "on")
    device = replace(CHIP, simulated=True)
    model = Model()
    prepare(model, device, table=lk.table(lk.linear("on_tiles", rank=1), device=device))
    assert set(layouts(model)) == {"acme.tiles"}


NO_TARGET = replace(lk.TURNED, name="acme.typo", pack="layout_kernels:pack_turnt")
WRONG = replace(lk.TURNED, name="acme.wrong", unpack="layout_kernels:unpack_turned_wrong")
RAISES = replace(lk.TURNED, name="acme.raises", pack="layout_kernels:pack_raising")


@pytest.mark.parametrize(
    ("layout", "proof", "told", "reason"),
    [
        (WRONG, "on", "does not give back what was packed: mend", "does not give back what was"),
        (RAISES, "on", None, "it raised RuntimeError: no room"),  # the proof's own reason
        (RAISES, "off", "raised RuntimeError: no room for tiles", "no room for tiles"),
        (NO_TARGET, "on", "could not be imported: AttributeError", "could not be imported"),
        (NO_TARGET, "off", "could not be imported: AttributeError", "could not be imported"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_layout_that_fails_costs_only_its_kernel(
    layout: Any, proof: str, told: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", proof)
    device = replace(CHIP, simulated=True)
    kernels = lk.linear("on_turned", layout, rank=2), lk.linear("on_tiles", rank=1)
    table = lk.table(*kernels, layouts=(layout, lk.TILES), device=device)
    model = Model()
    before, results = state(model), run(model)
    with pytest.warns(PolysiliconWarning, match=told) if told else contextlib.nullcontext():
        prepared = prepare(model, device, table=table)
    assert set(layouts(model)) == {"acme.tiles"}
    against = [c.reason for one in prepared.bindings for c in one.candidates]
    assert any(reason in text for text in against)
    assert_state(model, before)
    torch.testing.assert_close(run(model), results)


def test_numbers_that_compare_unequal_to_themselves_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "on")
    device = replace(CHIP, simulated=True)
    model = nn.Sequential(Linear(_parameter(21, 19)))
    with torch.no_grad():
        model[0].weight[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    prepare(model, device, table=lk.table(lk.linear("on_tiles", rank=1), device=device))
    assert layouts(model) == ["acme.tiles"]


def test_what_a_layout_cannot_hold_is_not_loaded_into_it(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, before, _ = packed
    monkeypatch.setenv("POLYSILICON_PROOF", "on")
    monkeypatch.setattr("polysilicon.layers.packed_weight._same_bits", lambda a, b: False)
    with torch.no_grad(), pytest.raises(LayoutError, match="does not give back what was packed"):
        model.first.weight.zero_()
    assert_state(model, before)
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    with pytest.warns(PolysiliconWarning, match="loaded stays plain"):
        model.first.load_state_dict({"weight": zeros["first.weight"], "bias": zeros["first.bias"]})
    assert not run(nn.Sequential(model.first)).any()
