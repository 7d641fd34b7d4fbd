"""The support matrix says what the committed reports say, and a fresh report is held against it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from scripts import ROOT, script

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = script("generate_support_matrix")
AGAIN = "run python docs/generate_support_matrix.py"


def _report(**changed: Any) -> dict[str, Any]:
    """A report of two kernels: one passes, one has a known gap."""
    failure = {"check": "values", "details": [], "text": "far off", "gap": True, "reason": "slow"}
    suite = {
        "suite": "test_conformance.py::TestOps",
        "kind": "OpSuite",
        "plugin": "acme",
        "version": "1.2",
        "device": "acme:x1",
        "how": "simulator",
        "why_not": "",
        "kernels": [
            {"op": "linear", "kernel": "linear.acme", "dtype": "float32"},
            {"op": "linear", "kernel": "linear.acme", "dtype": "float16"},
            {"op": "rms_norm", "kernel": "rms_norm.acme", "dtype": "float32"},
        ],
        "cases": [
            {"case": "linear.acme-float32", "failed": 0, "failures": []},
            {"case": "linear.acme-float16", "failed": 0, "failures": []},
            {"case": "rms_norm.acme-float32", "failed": 0, "failures": [failure]},
        ],
        "tests": [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "gap"}],
    }
    suite |= changed
    versions = {"core": "0.1.0", "torch": "2.13.0", "python": "3.11.1", "system": "Linux x86_64"}
    return {"schema": 1, **versions, "suites": [suite]}


def test_page_is_current() -> None:
    assert MATRIX.PAGE.read_text() == MATRIX.render_page(MATRIX.committed()), AGAIN


def test_section_of_the_readme_is_current() -> None:
    text = MATRIX.README.read_text()
    assert text == MATRIX.with_section(text, MATRIX.render_short(MATRIX.committed())), AGAIN


def test_every_plugin_of_this_repository_has_results() -> None:
    plugins = {file.parent.name for file in ROOT.glob("plugins/*/pyproject.toml")}
    assert {"core", *plugins} == {run["plugin"] for run in MATRIX.committed()}


def test_dtypes_that_fare_alike_share_a_row_and_gaps_state_their_reason() -> None:
    rows = MATRIX.render_page(MATRIX.results_of(_report())).splitlines()
    assert "| op | kernel | dtypes | acme:x1, simulator |" in rows
    assert "| `linear` | `linear.acme` | float32, float16 | passes |" in rows
    assert "| `rms_norm` | `rms_norm.acme` | float32 | gap (slow) |" in rows


def test_what_could_not_run_says_so() -> None:
    report = _report(how="not run", why_not="acme:x1 is not on this machine", cases=[])
    told = MATRIX.render_page(MATRIX.results_of(report))
    assert "| not run (acme:x1 is not on this machine) |" in told
    assert MATRIX.render_short(MATRIX.results_of(report)).endswith("| not run | 3 not run |")


def test_short_table_counts() -> None:
    told = MATRIX.render_short(MATRIX.results_of(_report())).splitlines()[-1]
    assert told == "| acme | `acme:x1` | simulator | 2 pass, 1 known gap |"


def _compiled(*problems: str) -> dict[str, Any]:
    """What `polysilicon compile --json` says of two variants of one kernel."""
    made: dict[str, Any] = {"op": "linear", "kernel": "linear.acme"}
    made |= {"plugin": "acme", "origin": "acme 1.2"}
    made["facts"] = {"toolchain": "acc 7"}
    variants = [
        {**made, "variant": "width 64 bfloat16: split", "problems": []},
        {**made, "variant": "width 128 float16", "problems": list(problems)},
    ]
    return {"schema": 1, "device": "acme:x2", "kernels": variants}


def test_what_was_only_compiled_stands_beside_what_ran() -> None:
    runs = [*MATRIX.results_of(_report()), *MATRIX.results_of(_compiled("spills"))]
    rows = MATRIX.render_page(runs).splitlines()
    assert "| op | kernel | dtypes | acme:x1, simulator | acme:x2, compiled |" in rows
    assert "| `linear` | `linear.acme` | float32 | passes | – |" in rows
    assert "| `linear` | `linear.acme` | float16 | passes | fails (spills) |" in rows
    assert "| `linear` | `linear.acme` | bfloat16 | – | compiles |" in rows
    assert "- acme:x2, compiled: acme 1.2, acc 7" in rows


def test_variants_that_name_no_dtype_say_so() -> None:
    report = _compiled()
    report["kernels"] = [{**report["kernels"][0], "variant": "width 64"}]
    said = "compiles (variants name no dtype)"
    runs = [*MATRIX.results_of(_report()), *MATRIX.results_of(report)]
    rows = MATRIX.render_page(runs).splitlines()
    assert f"| `linear` | `linear.acme` | float32, float16 | passes | {said} |" in rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of committed results."""
    monkeypatch.setattr(MATRIX, "FOLDER", tmp_path)
    return tmp_path


def test_added_results_replace_those_of_the_same_device_and_way(folder: Path) -> None:
    MATRIX.add(MATRIX.results_of(_report()))
    MATRIX.add(MATRIX.results_of(_report(device="acme:x2")))
    MATRIX.add(MATRIX.results_of(_report(version="1.3")))
    runs = json.loads((folder / "acme.json").read_text())["runs"]
    assert [(run["device"], run["version"]) for run in runs] == [
        ("acme:x1", "1.3"),
        ("acme:x2", "1.2"),
    ]


def test_fresh_report_that_differs_is_told_cell_by_cell(folder: Path) -> None:
    MATRIX.add(MATRIX.results_of(_report()))
    assert MATRIX.differences(MATRIX.results_of(_report(version="1.3"))) == []
    worse = _report()
    worse["suites"][0]["cases"][0]["failed"] = 1
    assert MATRIX.differences(MATRIX.results_of(worse)) == [
        "acme:x1 (simulator), linear.acme float32: passes is committed, found is fails"
    ]


def test_device_that_is_not_committed_is_told(folder: Path) -> None:
    assert MATRIX.differences(MATRIX.results_of(_report())) == [
        "acme:x1 (simulator): no results are committed"
    ]


@pytest.mark.parametrize("text", ["", f"{MATRIX.END} {MATRIX.BEGIN}", MATRIX.BEGIN])
def test_readme_without_the_markers_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected one line '<!-- Generated by"):
        MATRIX.with_section(text, "")
