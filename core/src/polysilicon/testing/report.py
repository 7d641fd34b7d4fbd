"""The JSON report of the suites (docs/json.md), from which support matrices are made."""

from __future__ import annotations

import platform
from importlib import metadata
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
    return {
        "schema": 1,
        "core": core_version(),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "totals": totals,
        "suites": rows,
    }


def _suite(name: str, suite: type[Suite], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    from polysilicon.testing.op_checks import op_cases  # imports torch

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
            "how": found.how,
            "why_not": found.why_not,
            "torch_device": found.torch_device,
            "kernels": [
                {"op": case.kernel.op, "kernel": case.kernel.name, "dtype": case.dtype}
                for case in op_cases(found.kernels)
            ],
        }
    gaps = gaps_of(suite.gaps)
    cases = [case_row(case, looked, gaps) for case, looked in suite.looked_at.items()]
    tests = [
        {"test": o["test"], "outcome": o["outcome"], "reason": o["reason"]}
        for o in outcomes
        if o["suite"] == name
    ]
    return {"suite": name, "kind": _kind(suite), **about, "cases": cases, "tests": tests}


def _kind(suite: type[Suite]) -> str:
    """Which of the four suites a vendor's class is."""
    ours = (base for base in suite.__mro__ if base.__module__.startswith("polysilicon.testing."))
    return next(ours).__name__


def case_row(case: str, findings: Sequence[Finding], gaps: Sequence[Gap]) -> dict[str, Any]:
    """One case: the names that gaps may call it, how many findings of each kind, what failed."""
    failed = [(finding, gap_for(finding, gaps)) for finding in findings if finding.text]
    known = [finding for finding, gap in failed if gap is not None]
    return {
        "case": case,
        "names": list(findings[0].names),
        "passed": sum(finding.state == "passed" for finding in findings),
        "skipped": sum(finding.state == "skipped" for finding in findings),
        "gaps": len(known),
        "failed": len(failed) - len(known),
        "failures": [
            {
                "check": finding.check,
                "details": list(finding.details),
                "text": finding.text,
                "gap": gap is not None,
                "reason": "" if gap is None else gap.reason,
            }
            for finding, gap in failed
        ],
    }
