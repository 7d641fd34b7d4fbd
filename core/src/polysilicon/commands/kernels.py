"""`polysilicon kernels`: every kernel that some plugin offers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polysilicon.records import Kernel, Provided


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(kernels)


def kernels(
    device: Annotated[
        str | None, typer.Option(help="Kernels offered on this device; by default the current one.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="Only kernels of this op.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lists the kernels offered on a device; `explain` says which one serves, and why."""
    from polysilicon.devices import resolve
    from polysilicon.ops import NAMES
    from polysilicon.selection import current_table

    if op is not None and op not in NAMES:
        raise ValueError(f"there is no op {op!r}: one of {', '.join(NAMES)}")
    found = resolve(device)
    table = current_table()  # after resolve: a chip that isn't here is asked for by its name
    rows = [
        _row(entry, entry.record.name in table.disabled, entry.record.op in NAMES)
        for entry in table.kernels[found.name]
        if op in (None, entry.record.op)
    ]
    if as_json:
        typer.echo(json.dumps({"schema": 1, "device": found.name, "kernels": rows}))
        return
    _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    """A table that fits 80 columns, and under it what there is to say of single kernels."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table()
    # A name cut short could not be pasted into POLYSILICON_DISABLE_KERNELS.
    for heading in ("kernel", "plugin", "for", "tokens", "rank", "form"):
        shown.add_column(heading, no_wrap=True)
    for row in rows:
        tokens = row["tokens"]
        shown.add_row(
            row["name"],
            row["plugin"],
            row["device"],
            "all" if tokens is None else f"{tokens[0]}–{tokens[1]}",
            str(row["rank"]),
            row["form"],
            style="" if row["state"] == "offered" else "dim",
        )
    console = Console()
    console.print(shown)
    for row in rows:
        state = "" if row["state"] == "offered" else row["state"]
        said = "; ".join(filter(None, (state, row["note"])))
        if said:
            console.print(f"[bold]{row['name']}[/]: {escape(said)}", highlight=False)


def _row(entry: Provided[Kernel], disabled: bool, known: bool) -> dict[str, Any]:
    kernel = entry.record
    state = "offered"
    if disabled:
        state = "turned off by POLYSILICON_DISABLE_KERNELS"
    if not known:
        state = "not used: this core has no such op"
    return {
        "op": kernel.op,
        "name": kernel.name,
        "device": kernel.device,
        "dtypes": sorted(kernel.dtypes),
        "tokens": None if kernel.tokens is None else list(kernel.tokens),
        "rank": kernel.rank,
        "form": kernel.form,
        "layouts": dict(kernel.layouts),
        "plugin": entry.origin.plugin,
        "origin": str(entry.origin),
        "state": state,
        "note": kernel.note,
    }
