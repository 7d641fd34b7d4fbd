"""`polysilicon plugins`: every installed plugin with its state and reason."""

from __future__ import annotations

import json
from typing import Annotated

import typer

_STYLES = {"active": "green", "disabled": "dim", "incompatible": "yellow", "broken": "red"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(plugins)


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lists the plugins: active, disabled, incompatible or broken, and why."""
    from polysilicon.plugins import plugins as found

    if as_json:
        from dataclasses import asdict

        rows = [asdict(row) for row in found()]
        typer.echo(json.dumps({"schema": 1, "plugins": rows}))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("plugin", "distribution", "version", "state", "reason")
    for row in found():
        state = f"[{_STYLES[row.state]}]{row.state}[/]"
        reason = row.reason + (f"\nwhat to do: {row.remedy}" if row.remedy else "")
        table.add_row(row.name, row.distribution, row.version, state, escape(reason))
    Console().print(table)
