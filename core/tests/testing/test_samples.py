"""What the suite runs kernels on: for every op the sizes and forms where kernels go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from polysilicon import ops
from polysilicon.records import Problem
from polysilicon.testing import DeviceUnderTest
from polysilicon.testing.facts import problem_of, tokens_of
from polysilicon.testing.findings import Finding, Gap, gaps_of
from polysilicon.testing.op_checks import all_samples
from polysilicon.testing.poison import Poisoned

if TYPE_CHECKING:
    from polysilicon.ops.contract import Op, Sample

CPU = torch.device("cpu")


def _samples(op: Op) -> list[Sample]:
    return list(all_samples(op, torch.float32, CPU))


@pytest.mark.parametrize("name", ops.NAMES)
def test_samples_hold_nothing_one_a_prime_and_one_off_a_tile(name: str) -> None:
    op = ops.get(name)
    sizes = {size for s in _samples(op) for size in next(iter(s.kwargs.values())).shape}
    assert {0, 1} <= sizes
    assert sizes & {3, 5, 7, 13}
    assert sizes & {15, 17, 31, 33, 63, 65, 127, 129}
    assert 0 in {tokens_of(op, sample) for sample in _samples(op)}


@pytest.mark.parametrize("name", ops.NAMES)
def test_samples_hold_strided_offset_and_expanded_arguments(name: str) -> None:
    tensors = [
        x
        for sample in _samples(ops.get(name))
        for x in sample.kwargs.values()
        if isinstance(x, Tensor) and x.numel() > 1
    ]
    assert any(not x.is_contiguous() and 0 not in x.stride() for x in tensors)
    assert any(x.storage_offset() for x in tensors)
    assert any(0 in x.stride() for x in tensors)


@pytest.mark.parametrize("name", ops.NAMES)
def test_problem_of_a_sample_states_each_fact_of_its_op(name: str) -> None:
    op = ops.get(name)
    for sample in _samples(op):
        assert set(problem_of(op, sample, "float32").facts) == op.keys


def test_problems_of_a_vendor_become_samples_of_their_shape() -> None:
    problem = Problem(op="rms_norm", dtype="float32", tokens=(4, 16), facts={"hidden": 96})
    extra = list(all_samples(ops.get("rms_norm"), torch.float32, CPU, [problem]))[-2:]
    assert [sample.kwargs["x"].shape for sample in extra] == [(4, 96), (7, 96)]


def test_poisoned_memory_holds_nan_the_largest_integer_or_true() -> None:
    x = torch.ones(3)
    with Poisoned():
        assert torch.empty(2).isnan().all()
        assert x.new_empty(2).isnan().all()
        assert torch.empty_like(x, dtype=torch.int8).eq(127).all()
        assert torch.empty(2, dtype=torch.bool).all()
        assert torch.zeros(2).eq(0).all()
    assert x.eq(1).all()


@pytest.mark.parametrize(
    ("key", "speaks"),
    [
        ("linear", True),
        ("linear.acme", True),
        ("linear.acme[bfloat16]", True),
        ("linear.acme[sections (8, 12), values, bfloat16]", True),
        ("linear.acme[float16]", False),
        ("linear.acme[bfloat16, tokens 7]", False),
        ("line", False),
    ],
)
def test_gap_speaks_of_findings_by_name_and_details(key: str, speaks: bool) -> None:
    finding = Finding(
        names=("linear.acme", "linear"), details=("bfloat16", "sections (8, 12)"), check="values"
    )
    assert Gap(key=key, reason="#1").matches(finding) is speaks


def test_gap_without_reason_or_closing_bracket_is_refused() -> None:
    with pytest.raises(TypeError, match="gap 'linear' has no reason: say why"):
        gaps_of({"linear": " "})
    with pytest.raises(TypeError, match=r"gap 'linear\[float16': expected NAME or NAME\[DETAIL"):
        gaps_of({"linear[float16": "#1"})


@pytest.mark.parametrize("gaps", [{"linear": None}, {"linear": " "}, {"linear[form": "#1"}, ["x"]])
def test_wrong_gaps_are_told_once_when_the_class_is_made(gaps: object) -> None:
    with pytest.raises(TypeError, match=r"^Acme: gap"):
        type("Acme", (DeviceUnderTest,), {"gaps": gaps})


def test_failure_shows_what_a_gap_would_call_it() -> None:
    finding = Finding(names=("linear.acme",), details=("float32",), check="form", text="bad")
    assert str(finding) == "linear.acme[float32, form]: bad"
    assert Gap(key=str(finding).partition(":")[0], reason="#1").matches(finding)
