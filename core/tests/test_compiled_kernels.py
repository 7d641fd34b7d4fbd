"""Core's kernels that a compiler makes on the device: which devices and problems they take."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from tables import CORE, CPU, PORTABLE, kernel, opaque, problem

from polysilicon.choosing import specificity
from polysilicon.explaining import explain
from polysilicon.kernels import compiled
from polysilicon.layers.base import Layer
from polysilicon.prepare import Prepared, prepare
from polysilicon.records import Device, Kernel, Problem, Provided
from polysilicon.selection import build_table

CHIP = Device(
    name="acme:x1",
    kind="acme",
    facts={"triton": "acme:compile", "native_formats": "int8,float8_e4m3fn"},
)
NORM = {"hidden": 4096, "eps": 1e-6, "offset": 0.0, "weight": True, "format": "int8/token/float32"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every toolchain looks as if it were installed."""
    monkeypatch.setattr(compiled, "find_spec", lambda name: name)


def _norm(form: str, device: Device = CHIP) -> Kernel:
    (found,) = (k for k in compiled.kernels(device) if k.name == f"rms_norm_quant.{form}")
    return found


def _against(form: str = "triton", **facts: object) -> str | None:
    record = _norm(form)
    assert record.supports is not None
    asked: dict[str, object] = {**NORM, **facts}
    return record.supports(Problem(op="rms_norm_quant", dtype="bfloat16", facts=asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["rms_norm_quant", "silu_and_mul_quant", "gated_delta_rule"])
def test_a_device_without_the_compiler_says_so(op: str) -> None:
    given = explain(Problem(op=op, dtype="bfloat16"), device="cpu")
    reasons = {c.provided.record.name: c.reason for c in given.candidates}
    assert reasons[f"{op}.triton"] == "is for devices with triton, and cpu states none"
    assert [c.provided.record.name for c in given.candidates if c.chosen] == [f"{op}.torch"]


def test_a_device_with_the_compiler_is_served_no_more_specifically_than_by_torch() -> None:
    assert specificity(_norm("triton"), CHIP) == 0
    assert specificity(_norm("triton"), replace(CHIP, facts={"triton": ""})) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"weight": False}, "takes a norm with a weight, and this has none"),
        ({"format": "int8/tensor/float32"}, "finds its scales in the call, and tensor has a given"),
        ({"format": "fp8_e4m3fnuz/token/float32"}, "converts to no float8_e4m3fnuz itself"),
        ({"format": "int8/channel/float32"}, "is no format of activations"),
        ({"hidden": 20480}, "hidden is 20480: it holds rows of up to 16384"),
        ({"hidden": 576, "format": "int8/group:128/float32"}, "not in whole groups of 128"),
    ],
)
def test_what_a_program_can_not_do_is_refused_with_the_reason(
    facts: dict[str, object], reason: str
) -> None:
    assert reason in (_against(**facts) or "")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("format", ["int8/token/float32", "fp8_e4m3fn/group:128/float32"])
def test_rows_in_whole_groups_and_native_formats_are_taken(format: str) -> None:
    assert _against(format=format) is None


@pytest.mark.usefixtures("installed")
def test_a_state_walks_with_few_tokens_only_and_with_keys_that_fit() -> None:
    (walk,) = (k for k in compiled.kernels(CHIP) if k.name == "gated_delta_rule.triton")

    def against(**facts: int) -> str | None:
        assert walk.supports is not None
        return walk.supports(Problem(op=walk.op, dtype="bfloat16", facts=facts))

    assert against(head_size=128) is None
    assert against(head_size=512) == "head_size is 512: it holds states of up to 256"
    assert "each key channel has its own" in (against(by_channel=True) or "")
    assert walk.tokens == (1, 256)


@pytest.mark.parametrize(
    ("form", "remedy"),
    [
        ("triton", "pip install 'triton>=3.6,<3.10'"),
        ("helion", "pip install 'polysilicon[helion]'"),
    ],
)
def test_a_missing_toolchain_is_named_with_the_remedy(
    form: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert _against(form) == f"needs {form}, which is not installed: {remedy}"


def test_looking_at_the_records_imports_no_toolchain() -> None:
    code = (
        "import sys; from polysilicon.selection import current_table; current_table()\n"
        "print([name for name in ('triton', 'helion') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("installed")
def test_helion_serves_by_name_only() -> None:
    assert _norm("helion").rank < PORTABLE.rank < _norm("triton").rank


# --- proof ----------------------------------------------------------------------------------------


class Gate(Layer):
    """A layer of one op."""

    def problems(self) -> dict[str, Problem]:
        return {"silu_and_mul": problem(1, 64, width=4096)}


def _prepared(record: Kernel) -> Prepared:
    """What serves where core itself offers a kernel beside the portable one."""
    portable = kernel("right", name="silu_and_mul.torch")
    device = replace(CPU, facts={"triton": "acme:compile"})
    offered = [Provided(record=one, origin=CORE) for one in (record, portable)]
    table = build_table(
        devices=[Provided(record=device, origin=CORE)],
        layouts={device.name: ()},
        kernels={device.name: offered},
    )
    return prepare(Gate(), device, table=table)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("bad", ["wrong", "slow"])
def test_a_compiled_kernel_of_core_is_proven_as_a_plugins_is(bad: str) -> None:
    prepared = _prepared(kernel(bad, rank=1, device="*:triton"))
    assert [row.kernel for row in prepared.rows] == ["silu_and_mul.torch"]
    (binding,) = prepared.bindings
    reasons = {c.provided.record.name: c.reason for c in binding.candidates}
    assert "by proof" in reasons[f"silu_and_mul.{bad}"]


@pytest.mark.usefixtures("fresh")
def test_a_right_compiled_kernel_of_core_serves() -> None:
    prepared = _prepared(opaque("right", rank=1, device="*:triton", name="silu_and_mul.as_right"))
    assert [row.kernel for row in prepared.rows] == ["silu_and_mul.as_right"]
