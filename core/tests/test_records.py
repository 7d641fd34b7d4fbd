"""Records validate themselves, and name themselves in the error."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from polysilicon.errors import PolysiliconError, RecordError
from polysilicon.records import Device, Format, Kernel, Layout, Problem

KERNEL: dict[str, Any] = {"op": "linear", "name": "linear.x", "target": "a.b:c"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(name="Acme", kind="acme"), "device name 'Acme' is not valid"),
        (lambda: Device(name="acme", kind=""), "device kind name '' is not valid"),
        (lambda: Device(name="a", kind="a", token_buckets=(4, 2)), "token_buckets must rise"),
        (lambda: Device(name="a", kind="a", activate="x"), "expected 'package.module:attribute'"),
        (lambda: Layout(name="l", role="weights"), "has role 'weights'"),  # type: ignore[arg-type]
        (lambda: Layout(name="l", role="kv_block", pack="a:b"), "only one of pack and unpack"),
        (lambda: Layout(name="l", role="kv_block", pack="a", unpack="b"), "has target 'a'"),
        (lambda: Format(dtype="fp8"), "write float8_e4m3fn or float8_e4m3fnuz"),
        (lambda: Format(dtype="int8", scale_dtype="float32"), "only one of scale_dtype and gran"),
        (lambda: Problem(op="linear", dtype="half"), "problem for 'linear' has dtype 'half'"),
        (
            lambda: Problem(op="linear", dtype="int8", tokens=(0, 4)),
            "has tokens .0, 4.: expected 0 <",
        ),
        (
            lambda: Problem(op="linear", dtype="int8", tokens=(5, 4)),
            "has tokens .5, 4.: expected 0 <",
        ),
        (lambda: Kernel(**{**KERNEL, "target": "a.b.c"}), "kernel 'linear.x' has target 'a.b.c'"),
        (lambda: Kernel(**KERNEL, dtypes=frozenset({"bf16"})), r"unknown dtypes \['bf16'\]"),
        (lambda: Kernel(**KERNEL, form="magic"), "has form 'magic'"),  # type: ignore[arg-type]
        (lambda: Kernel(**KERNEL, form="opaque"), "is opaque and has no fake"),
        (lambda: Kernel(**KERNEL, tokens=(4, 2)), "expected 0 < low <= high"),
        (lambda: Kernel(**KERNEL, device="Acme:A1"), "kernel device name 'Acme:A1'"),
    ],
)
def test_record_that_does_not_hold_together_is_refused(make: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        make()


def test_record_errors_are_value_errors_and_ours() -> None:
    assert issubclass(RecordError, ValueError)
    assert issubclass(RecordError, PolysiliconError)


def test_records_are_frozen_down_to_their_mappings() -> None:
    problem = Problem(op="linear", dtype="int8", facts={"in": 3})
    with pytest.raises(FrozenInstanceError):
        problem.op = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        problem.facts["in"] = 4  # type: ignore[index]
    assert (problem.fact("in"), problem.fact("out", 7)) == (3, 7)


def test_facts_given_as_a_dict_are_copied() -> None:
    facts: dict[str, Any] = {"cores": 2}
    device = Device(name="a", kind="a", facts=facts)
    facts["cores"] = 3
    assert device.facts["cores"] == 2


def test_equal_problems_have_equal_hashes() -> None:
    one, same = (Problem(op="linear", dtype="float32", facts={"in": 48}) for _ in range(2))
    assert {one: 1}[same] == 1


def test_every_new_field_has_a_default_so_that_old_plugins_keep_working() -> None:
    assert Device(name="a", kind="a").present
    assert Kernel(**KERNEL).form == "traceable"
    assert Layout(name="l", role="embedding").pack is None


@pytest.mark.parametrize("dims", [("?",), ("",), ("N/",), ("N/0",), ("N", 3), "NK", ["N", "K"]])
def test_layout_refuses_what_is_no_dim(dims: Any) -> None:
    with pytest.raises(RecordError, match="expected a tuple of names, sizes and tiles"):
        Layout(name="acme.odd", role="linear_weight", dims=dims)


def test_layout_takes_names_sizes_and_tiles() -> None:
    Layout(name="acme.deep", role="linear_weight", dims=("N/48", "2H/p", "8", "t/p", "p"))
