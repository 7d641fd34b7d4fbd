"""The JSON report of the suites (docs/json.md), from which support matrices are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from polysilicon.discovery import core_version
from polysilicon.errors import PolysiliconError
from polysilicon.testing.findings import Finding, gap_for, gaps_of
from polysilicon.testing.subject import subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from polysilicon.testing.findings import Gap
    from polysilicon.testing.suite import Suite


class Outcome(TypedDict):
    """How one test ended: `passed`, `failed`, `skipped` or `gap` (a known one)."""

    suite: str
    test: str
    outcome: str
    reason: str


def as_report(suites: Mapping[str, type[Suite]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that was tested, by suite."""
    totals = dict.fromkeys(("passed", "failed", "gap", "skipped"), 0)
    for outcome in outcomes:
        totals[outcome["outcome"]] += 1
    rows = [_suite(name, suite, outcomes) for name, suite in suites.items()]
    return {"schema": 1, "core": core_version(), "totals": totals, "suites": rows}


def _suite(name: str, suite: type[Suite], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    try:
        found = subject(suite)
    except PolysiliconError as error:
        about: dict[str, Any] = {"plugin": suite.plugin, "error": str(error)}
    else:
        device = found.device
        about = {
            "plugin": found.row.name,
            "distribution": found.row.distribution,
            "version": found.row.version,
            "device": None if device is None else device.name,
            "simulated": device is not None and (device.simulated or not device.present),
            "torch_device": found.torch_device,
        }
    gaps = gaps_of(suite.gaps)
    cases = [case_row(case, looked, gaps) for case, looked in suite.looked_at.items()]
    tests = [
        {"test": o["test"], "outcome": o["outcome"], "reason": o["reason"]}
        for o in outcomes
        if o["suite"] == name
    ]
    return {"suite": name, **about, "cases": cases, "tests": tests}


def case_row(case: str, findings: Sequence[Finding], gaps: Sequence[Gap]) -> dict[str, Any]:
    """One case: the names that gaps may call it, how many findings of each kind, what failed."""
    failed = [finding for finding in findings if finding.text]
    known = [finding for finding in failed if gap_for(finding, gaps)]
    return {
        "case": case,
        "names": list(findings[0].names),
        "passed": sum(finding.state == "passed" for finding in findings),
        "skipped": sum(finding.state == "skipped" for finding in findings),
        "gaps": len(known),
        "failed": len(failed) - len(known),
        "failures": [
            {"check": f.check, "details": list(f.details), "text": f.text, "gap": f in known}
            for f in failed
        ],
    }
