"""prepare(): every op slot of every layer bound once, with rows that say what and why."""

from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tables import CHIP, kernel, opaque, problem, table

import polysilicon
from polysilicon.errors import DeviceError, PolysiliconWarning
from polysilicon.layers import RMSNorm
from polysilicon.layers.activation import GatedActivation
from polysilicon.layers.attention import Attention
from polysilicon.layers.base import Layer
from polysilicon.prepare import Row, prepare

if TYPE_CHECKING:
    from polysilicon.records import Problem

pytestmark = pytest.mark.usefixtures("fresh")


class Gate(Layer):
    """A layer of one op in one slot."""

    gate: Any

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.asked = problem(**facts)

    def problems(self) -> dict[str, Problem]:
        return {"gate": self.asked}

    def forward(self, x: torch.Tensor) -> Any:
        return self.gate(x)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(Gate(width=4), torch.nn.Linear(4, 8), Gate(width=4))


def test_every_slot_is_bound_and_equal_problems_share_a_binding() -> None:
    model = _model()
    prepared = prepare(model)
    assert [one.layer for one in prepared.bound] == ["0", "2"]
    assert len(prepared.bindings) == 1
    assert model(torch.ones(3, 8)).shape == (3, 4)


def test_rows_say_op_kernel_tokens_uses_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    found = table(kernel("right", rank=1, tokens=(1, 4), note="measured"))
    assert prepare(_model(), table=found).rows == (
        Row(
            op="silu_and_mul",
            kernel="silu_and_mul.right",
            tokens="1–4",
            uses=2,
            reason="highest rank (1): measured",
        ),
        Row(
            op="silu_and_mul",
            kernel="silu_and_mul.torch",
            tokens="≥5",
            uses=2,
            reason="the only one that fits",
        ),
    )


def test_model_without_our_layers_has_no_rows() -> None:
    assert prepare(torch.nn.Linear(2, 2)).rows == ()


def test_weights_on_meta_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"weight 1\.weight is on the meta device.*load the weights"
    ):
        prepare(torch.nn.Sequential(Gate(), torch.nn.Linear(2, 2, device="meta")))


def test_forced_absent_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    absent = replace(CHIP, present=False)
    with pytest.raises(DeviceError, match="acme:x1 is forced and not on this machine"):
        prepare(_model(), absent, table=table(device=absent))


def test_unknown_device_lists_the_present_ones() -> None:
    with pytest.raises(
        DeviceError, match=r"no device 'cqu' here .did you mean cpu.*devices are cpu"
    ):
        prepare(_model(), "cqu")


def test_fingerprint_changes_with_the_kernel_and_with_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    one, other = table(kernel("right", rank=1)), table(kernel("second", rank=1))
    assert prepare(_model(), table=one).fingerprint == prepare(_model(), table=one).fingerprint
    assert prepare(_model(), table=one).fingerprint != prepare(_model(), table=other).fingerprint


def test_kernel_that_raises_in_a_forward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    model = _model()
    prepared = prepare(model, table=table(opaque("raises", name="silu_and_mul.bad", rank=1)))
    with torch.inference_mode(), pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 8))
    assert "POLYSILICON_DISABLE_KERNELS=silu_and_mul.bad" in str(
        prepared.kernel_failed(caught.value)
    )


def test_prepared_model_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    model = _model()
    prepare(model, table=table(opaque("right", rank=1, tokens=(1, 4))))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for tokens in (2, 4, 5, 9):
            x = torch.randn(tokens, 8)
            torch.testing.assert_close(compiled(x), model(x))


def test_public_name_is_the_function() -> None:
    # Importing the module binds it to the package, where it must not take the function's name.
    importlib.import_module("polysilicon.prepare")
    assert polysilicon.prepare is prepare


def test_slot_that_a_layer_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="Gate has no op slot 'gaet': one of gate"):
        Gate().bind_kernel("gaet", len)


@pytest.mark.parametrize("device", [torch.device("cpu"), None, 3], ids=str)
def test_what_is_no_device_is_told(device: Any) -> None:
    with pytest.raises(
        TypeError, match=r"prepare\(\) got .* as device: expected a Device or its n"
    ):
        prepare(_model(), device)


@pytest.mark.parametrize("copied", [False, True])
def test_a_cast_leaves_kernels_that_do_not_take_the_dtype(
    copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    narrow = kernel("right", rank=1, dtypes=frozenset({"float32", "float16"}))
    model = GatedActivation("silu")
    portable = model.gate_kernel
    prepare(model, table=table(narrow))
    bound = model.gate_kernel
    assert bound is not portable
    model = copy.deepcopy(model) if copied else model
    assert model.half().gate_kernel is bound
    with pytest.warns(
        PolysiliconWarning, match=r"moved to float64.*call prepare\(\) again"
    ) as told:
        model.double()
    assert model.gate_kernel is portable
    assert len(told) == 1
    assert model(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
    model.float()


def test_every_layer_follows_a_cast() -> None:
    attention = Attention(2, 2, 8, scale=1.0)
    attention.bind_kernel("attention", print, frozenset({"float32"}))
    with pytest.warns(PolysiliconWarning, match="moved to bfloat16"):
        attention.to(torch.bfloat16)
    assert attention.attention is not print
    assert attention.problems()["kv_store"].dtype == "bfloat16"
    norm = RMSNorm(torch.nn.Parameter(torch.ones(8)), 1e-6).double()
    assert norm(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
