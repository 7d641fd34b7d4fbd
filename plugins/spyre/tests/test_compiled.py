"""Plans of linear: labelled as such, and the bytes add up."""

from __future__ import annotations

from polysilicon_spyre import compiled
from polysilicon_spyre.chips import SPYRE
from polysilicon_spyre.device import devices


def test_plans_are_labelled_and_add_up() -> None:
    (simulator,) = devices("spyre:sim", torch_spyre=False)
    plans = list(compiled.linear(simulator))
    assert len({plan.variant for plan in plans}) == len(plans) == 16
    assert all(plan.variant.startswith("planned, not run: ") for plan in plans)
    assert not any(plan.problems for plan in plans)
    padded = compiled.plan(64, 100, 64).facts
    # The front end's own case: y becomes [1, 128, 64], filled and copied once a call.
    assert padded["cores"] == 32
    assert padded["padding_bytes"] == 64 * 28 * 2
    read_and_written = 64 * 2 * 128 + 100 * 128 + 64 * 128
    assert padded["moved_bytes"] == read_and_written + 128 * (100 + 2 * 128)


def test_plan_of_an_impossible_span_is_a_problem() -> None:
    (problem,) = compiled.plan(1, 65536, 131 * 64).problems
    assert f"{SPYRE.span_bytes >> 20} MiB" in problem
