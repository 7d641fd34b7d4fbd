"""The suite finds each mutant by the test that says so, and says what to do about stale gaps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polysilicon.testing import DeviceUnderTest, OpSuite

HERE = Path(__file__).parent
PLUGINS = [HERE.parent / "data" / "plugins" / name for name in ("mutants", "stray")]

CLAIMS = "test_kernel_claims_some_sample"
RUNS = "test_kernel_runs_on_every_sample_it_claims"
FORM = "test_results_have_the_declared_form"
WRITTEN = "test_every_element_is_written"
VALUES = "test_values_agree_with_the_reference"
ARGUMENTS = "test_arguments_keep_their_bits"
BITS = "test_the_same_input_gives_the_same_bits"
SHAPES = "test_shape_function_agrees_with_the_kernel"

#: Mutant → the test that must find it. A dtype where only one shows it.
FOUND_BY = {
    "attention.sees_next_key-float32": VALUES,
    "attention.wrong_heads-float32": VALUES,
    "attention.window_off_by_one-float32": VALUES,
    "rms_norm.eps_outside_root-float32": VALUES,
    "silu_and_mul.writes_input-float32": ARGUMENTS,
    "layer_norm.stays_float32-bfloat16": FORM,
    "gelu_and_mul.ignores_strides-float32": VALUES,
    "linear.leaves_last_tile-float32": WRITTEN,
    "linear.missing-float32": RUNS,
    "embedding.noisy-float32": BITS,
    "activation.fails_on_nothing-float32": RUNS,
    "rms_norm_gated.tells_wrong_shape-bfloat16": SHAPES,
    "kv_store.stores_padding-float32": ARGUMENTS,
    "lm_head.claims_nothing-float32": CLAIMS,
    "RMSNorm.forward_add-float32": "test_layer_compiles_to_one_graph_and_agrees",
    "Linear-float32": "test_layer_agrees_with_the_portable_one",
    "mutants.loses_tail-float32": "test_unpack_gives_back_what_was_packed",
    "mutants.pads_with_ones-float32": "test_padding_holds_zeros",
    "mutants": "test_plugin_module_imports_nothing_heavy",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the suites over the plugin of mutants, in a process of its own."""
    file = tmp_path_factory.mktemp("report") / "out.json"
    folders = [*map(str, PLUGINS)]
    code = f"import sys, pytest; sys.path[:0] = {folders!r}; sys.exit(pytest.main())"
    options = ["-q", "-p", "no:cacheprovider", "-p", "polysilicon.testing.plugin"]
    options += ["--polysilicon-report", str(file)]
    ran = subprocess.run(
        [sys.executable, "-c", code, *options, str(HERE / "mutants_suite.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    told: dict[str, Any] = json.loads(file.read_text())
    return told


def _tests(report: dict[str, Any], suite: str) -> dict[str, dict[str, str]]:
    rows = [row for row in report["suites"] if row["suite"].endswith(suite)]
    return {test["test"]: test for row in rows for test in row["tests"]}


def _own_tests(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    suites = ("::TestPlugin", "::TestLayouts", "::TestOps", "::TestLayers")
    return {name: test for suite in suites for name, test in _tests(report, suite).items()}


@pytest.mark.parametrize("mutant", FOUND_BY)
def test_mutant_is_found_by_the_test_that_says_so(report: dict[str, Any], mutant: str) -> None:
    test = _own_tests(report)[f"{FOUND_BY[mutant]}[{mutant}]"]
    assert test["outcome"] == "failed"
    assert test["reason"]


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("test_requirement_on_core_has_floor_and_ceiling", "no highest polysilicon: add <"),
        ("test_hooks_give_the_same_records_again", "other records when they were asked again"),
        ("test_targets_exist", "acme_mutants_kernels has no nowhere"),
        ("test_supports_answers_problems_that_state_little", "raised KeyError"),
    ],
)
def test_plugin_that_is_wrong_as_a_whole_is_told_why(
    report: dict[str, Any], test: str, text: str
) -> None:
    row = _own_tests(report)[f"{test}[mutants]"]
    assert row["outcome"] == "failed"
    assert text in row["reason"]


def test_what_is_right_in_a_mutant_passes(report: dict[str, Any]) -> None:
    outcomes = {name: test["outcome"] for name, test in _own_tests(report).items()}
    assert outcomes[f"{VALUES}[silu_and_mul.writes_input-float32]"] == "passed"
    assert outcomes[f"{VALUES}[add_rms_norm.reads_a_number-bfloat16]"] == "passed"
    assert outcomes["test_detection_is_quick_and_does_not_raise[mutants]"] == "passed"
    assert outcomes["test_layer_agrees_with_the_portable_one[RMSNorm.forward_add-float32]"] == (
        "passed"
    )


def test_what_could_not_be_looked_at_does_not_pass(report: dict[str, Any]) -> None:
    outcomes = {name: test["outcome"] for name, test in _own_tests(report).items()}
    assert outcomes[f"{VALUES}[linear.missing-float32]"] == "skipped"
    assert outcomes[f"{VALUES}[lm_head.claims_nothing-float32]"] == "skipped"


def test_layers_that_no_kernel_of_the_plugin_serves_are_skipped(report: dict[str, Any]) -> None:
    row = _own_tests(report)["test_layer_agrees_with_the_portable_one[RotaryEmbedding-float32]"]
    assert row["outcome"] == "skipped"
    assert row["reason"] == "no kernel of mutants serves it in float32"


def test_known_gap_is_an_expected_failure_with_its_reason(report: dict[str, Any]) -> None:
    row = _tests(report, "::TestKnown")[f"{VALUES}[attention.window_off_by_one-float32]"]
    assert row["outcome"] == "gap"
    assert row["reason"] == "known, all of it (#1)"


def test_gaps_that_pass_or_match_nothing_fail(report: dict[str, Any]) -> None:
    row = _tests(report, "::TestKnown")["test_known_gaps_still_fail"]
    assert row["outcome"] == "failed"
    assert "'silu_and_mul.writes_input[values]' passes now" in row["reason"]
    assert (
        "'activation.fails_on_nothing[tokens 12]' matches nothing, 'tokens 12' is no detail"
        in (row["reason"])
    )
    assert "the checks are arguments, claim, determinism" in row["reason"]
    assert "'rms_norm.no_such_kernel' matches nothing" in row["reason"]
    assert "window_off_by_one" not in row["reason"]


def test_plugin_that_is_not_installed_fails_once_with_what_to_do(report: dict[str, Any]) -> None:
    first, *others = _tests(report, "::TestElsewhere").values()
    assert first["outcome"] == "failed"
    assert first["reason"].startswith("plugin 'elsewhere' is not installed")
    assert "\n" not in first["reason"]
    assert {row["outcome"] for row in others} == {"skipped"}
    assert all("see the failure of" in row["reason"] for row in others)


def test_suite_that_could_test_no_kernel_fails_and_says_why(report: dict[str, Any]) -> None:
    rows = _tests(report, "::TestWrongDevice")
    failed = [row["reason"] for row in rows.values() if row["outcome"] == "failed"]
    assert len(failed) == 1
    assert "plugin stray has kernels (2), and none was tested" in failed[0]
    assert "they are for qark, stray" in failed[0]


def test_kernel_for_a_device_that_nothing_answers_to_is_told(report: dict[str, Any]) -> None:
    rows = _tests(report, "::TestStray")
    row = rows["test_kernels_are_for_devices_that_there_are[stray]"]
    assert row["outcome"] == "failed"
    assert "Kernel.device is 'qark', and no device answers to that" in row["reason"]
    assert "plugin[devices]: activation.stray" in row["reason"]


def test_kernels_of_an_absent_device_are_skipped_with_the_reason(report: dict[str, Any]) -> None:
    rows = _tests(report, "::TestAbsent").values()
    assert {(row["outcome"], row["reason"]) for row in rows} == {
        ("skipped", "mutants:m2 is not on this machine, and run_on names no interpreter's device")
    }


def test_kernels_of_an_absent_device_run_in_an_interpreter(report: dict[str, Any]) -> None:
    rows = _tests(report, "::TestInterpreted")
    assert f"{VALUES}[activation.interpreted-bfloat16]" in rows
    assert {row["outcome"] for row in rows.values()} == {"passed"}
    suite = next(row for row in report["suites"] if row["suite"].endswith("::TestInterpreted"))
    assert (suite["device"], suite["torch_device"], suite["simulated"]) == (
        "mutants:m2",
        "cpu",
        True,
    )


def test_report_counts_and_names_device_and_versions(report: dict[str, Any]) -> None:
    suite = next(row for row in report["suites"] if row["suite"].endswith("::TestOps"))
    assert (report["schema"], suite["device"], suite["version"]) == (1, "mutants:m1", "1.0")
    assert report["totals"]["gap"] > 0
    case = next(c for c in suite["cases"] if c["case"] == "linear.leaves_last_tile-float32")
    assert case["names"] == ["linear.leaves_last_tile", "linear"]
    assert case["failed"] == len(case["failures"]) > 0


def test_overriding_or_removing_a_suite_test_is_refused() -> None:
    class Vendor(DeviceUnderTest):
        plugin = "core"

    for changed in (VALUES, "cases", "settle"):
        with pytest.raises(TypeError, match=f"Cheat overrides {changed}.*list what fails in gaps"):
            type("Cheat", (Vendor, OpSuite), {changed: None})
        beside = type("Beside", (Vendor,), {changed: None})
        with pytest.raises(TypeError, match=f"Cheat overrides {changed}"):
            type("Cheat", (beside, OpSuite), {})
