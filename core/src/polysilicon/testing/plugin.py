"""The pytest plugin: `pytest_plugins = ["polysilicon.testing.plugin"]` in conftest.py.

Never loaded by itself. Adds `--polysilicon-report FILE`, the JSON report of docs/json.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polysilicon.testing.report import Outcome, as_report
from polysilicon.testing.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Generator

_suites: pytest.StashKey[dict[str, type[Suite]]] = pytest.StashKey()
_outcomes: pytest.StashKey[list[Outcome]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the report's file."""
    parser.getgroup("polysilicon").addoption(
        "--polysilicon-report", type=Path, help="Write a JSON report of the suites to this file."
    )


def pytest_configure(config: pytest.Config) -> None:
    """A report is of one process: findings of parallel workers stay in theirs."""
    # Named in a test module instead of conftest.py, the plugin comes too late to add an option.
    if config.getoption("--polysilicon-report", None) and config.getoption("numprocesses", None):
        raise pytest.UsageError("--polysilicon-report needs one process: leave out -n")


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Remembers the suites, for the report."""
    found = {
        item.nodeid.rpartition("::")[0]: item.cls
        for item in items
        if isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, Suite)
    }
    session.config.stash[_suites] = found
    session.config.stash[_outcomes] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers how each suite test ended: its own phase, or a set-up that skipped or failed."""
    report = yield
    suite = item.nodeid.rpartition("::")[0]
    counts = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if counts and suite in item.config.stash.get(_suites, {}):
        gap = hasattr(report, "wasxfail")
        outcome = "gap" if gap and report.skipped else report.outcome
        item.config.stash[_outcomes].append(
            Outcome(
                suite=suite,
                test=item.nodeid.rpartition("::")[2],
                outcome=outcome,
                reason="" if outcome == "passed" else _reason(report),
            )
        )
    return report


def _reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    if isinstance(report.longrepr, tuple):  # a skip: (file, line, "Skipped: …")
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the report, if it was asked for."""
    file: Path | None = session.config.getoption("--polysilicon-report", None)
    if file is not None:
        suites = session.config.stash.get(_suites, {})
        outcomes = session.config.stash[_outcomes] if suites else []
        report = as_report(suites, outcomes)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
