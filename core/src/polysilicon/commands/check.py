"""`polysilicon check [OP…]`: the kernels of a device against the references of their ops."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polysilicon.records import Device, Kernel, Provided
    from polysilicon.testing.findings import Finding


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(check)


def check(
    op: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="Ops to check; all if none.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or KIND:CHIP, KIND:ARCH; by default the current one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Runs every kernel of a device on its op's samples, and compares with the reference.

    The exit status is 1 if any kernel is wrong.
    """
    from polysilicon.devices import require_runnable, resolve, use
    from polysilicon.ops import NAMES

    for name in op or ():
        if name not in NAMES:
            raise ValueError(f"there is no op {name!r}: one of {', '.join(NAMES)}")
    found = require_runnable(resolve(device))
    use(found.name)  # activates it, as a run would
    rows = _rows(found, tuple(op or NAMES))
    if as_json:
        typer.echo(json.dumps({"schema": 1, "device": found.name, "kernels": rows}))
    else:
        _show(rows, found)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _rows(device: Device, ops: tuple[str, ...]) -> list[dict[str, Any]]:
    from polysilicon.choosing import specificity
    from polysilicon.selection import current_table
    from polysilicon.testing.op_checks import CLAIM, check_kernel, op_cases

    table = current_table()
    offered = table.offered(device)
    entries = {
        entry.record.name: entry
        for entry in table.kernels[device.name]
        if entry.record.op in ops and specificity(entry.record, device) is not None
    }
    kernels = sorted((e.record for e in entries.values()), key=lambda k: ops.index(k.op))
    rows = []
    for case in op_cases(kernels):
        # A kernel of which no sample can judge is not wrong: its row shows that all were skipped.
        findings = check_kernel(case, device.torch_device, (), offered)
        findings = tuple(finding for finding in findings if finding.check != CLAIM)
        rows.append(_row(entries[case.kernel.name], case.dtype, findings))
    return rows


def _row(entry: Provided[Kernel], dtype: str, findings: Sequence[Finding]) -> dict[str, Any]:
    by_sample: dict[tuple[str, ...], set[str]] = {}
    for finding in findings:
        by_sample.setdefault(finding.details, set()).add(finding.state)
    failed = [finding for finding in findings if finding.text]
    return {
        "op": entry.record.op,
        "kernel": entry.record.name,
        "dtype": dtype,
        "plugin": entry.origin.plugin,
        "origin": str(entry.origin),
        "passed": sum(states == {"passed"} for states in by_sample.values()),
        "failed": sum("failed" in states for states in by_sample.values()),
        "skipped": sum(states == {"skipped"} for states in by_sample.values()),
        "failures": [
            {"check": f.check, "details": list(f.details), "text": f.text} for f in failed
        ],
    }


def _show(rows: list[dict[str, Any]], device: Device) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table()
    for heading in ("kernel", "dtype", "plugin", "passed", "skipped", "failed"):
        shown.add_column(heading, no_wrap=True)
    if any(row["failures"] for row in rows):
        shown.add_column("first failure", overflow="fold", min_width=20)
    for row in rows:
        first = next((f"{f['check']}: {f['text']}" for f in row["failures"]), "")
        failed = f"[red]{row['failed']}[/]" if row["failed"] else "0"
        shown.add_row(
            row["kernel"],
            row["dtype"],
            row["plugin"],
            str(row["passed"]),
            str(row["skipped"]),
            failed,
            *([escape(first)] if first else []),
        )
    console = Console()
    console.print(shown)
    wrong = sum(1 for row in rows if row["failed"])
    simulated = " (simulated)" if device.simulated else ""
    console.print(f"{len(rows)} kernels × dtypes on {device.name}{simulated}: {wrong} wrong")
