"""explain(): every candidate with its reason, as data, as text and as a table."""

from __future__ import annotations

import json

import pytest
from tables import kernel, table

import polysilicon
from polysilicon import ops
from polysilicon.explaining import explain, span_text

pytestmark = pytest.mark.usefixtures("fresh")


def test_data_holds_every_candidate_and_the_chosen_spans() -> None:
    found = table(kernel("right", rank=1, tokens=(1, 4)), kernel("second", device="other"))
    data = explain("silu_and_mul", device="cpu", table=found, facts={"width": 8}).as_dict()
    assert data["schema"] == 1
    assert data["facts"] == {"width": 8}
    assert [(row["kernel"], row["chosen"]) for row in data["candidates"]] == [
        ("silu_and_mul.right", [[1, 4]]),
        ("silu_and_mul.torch", [[5, 1 << 20]]),
        ("silu_and_mul.second", []),
    ]
    assert all(row["reason"] and row["origin"] for row in data["candidates"])
    json.dumps(data)


def test_text_is_the_table() -> None:
    found = table(kernel("second", device="other"))
    text = str(explain("silu_and_mul", device="cpu", table=found))
    for part in ("silu_and_mul float32 on cpu", "silu_and_mul.second", "is for other, this is cpu"):
        assert part in text


def test_command_in_a_reason_is_shown_with_its_brackets() -> None:
    found = table(kernel("extra", supports=lambda problem: "pip install 'acme[run]'"))
    assert "'acme[run]'" in str(explain("silu_and_mul", device="cpu", table=found))


def test_nothing_that_fits_is_explained_and_no_error() -> None:
    found = table(kernel("right", device="other"), portable=False)
    (candidate,) = explain("silu_and_mul", device="cpu", table=found).candidates
    assert candidate.chosen == ()


@pytest.mark.parametrize("name", ops.NAMES)
def test_every_op_of_core_has_a_kernel_that_serves_it_on_cpu(name: str) -> None:
    explanation = polysilicon.explain(name, device="cpu")
    spans = [span for one in explanation.candidates for span in one.chosen]
    assert sum(high - low + 1 for low, high in spans) == 1 << 20


@pytest.mark.parametrize(
    ("tokens", "text"),
    [((1, 16), "1–16"), ((4, 4), "4"), ((17, 1 << 20), "≥17"), ((1, 1 << 20), "all")],
)
def test_spans_read_like_text(tokens: tuple[int, int], text: str) -> None:
    assert span_text(tokens) == text


def test_unknown_op_lists_the_ops() -> None:
    with pytest.raises(ValueError, match="there is no op 'rmsnorm': one of rms_norm"):
        polysilicon.explain("rmsnorm")
