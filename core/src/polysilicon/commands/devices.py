"""`polysilicon devices`: the devices that the plugins found."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(devices)


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Lists the devices of this machine, the preferred one first."""
    from polysilicon.api import forced_device
    from polysilicon.devices import as_dict, find
    from polysilicon.devices import devices as found

    if (forced := forced_device()) is not None:
        find(forced)  # a name that means nothing is told, not left out
    rows = [as_dict(device) for device in found()]
    if as_json:
        typer.echo(json.dumps({"schema": 1, "devices": rows}))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Devices are typed as they are shown here, so these columns are never cut; the others fold.
    table = Table()
    for heading in ("device", "arch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("torch", "memory", "state", "facts"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        memory = row["memory_bytes"]
        state = "present" if row["present"] else "forced, absent"
        table.add_row(
            row["name"],
            row["arch"],
            row["torch_device"],
            "?" if memory is None else f"{memory / 2**30:.1f} GiB",
            state + (", simulated" if row["simulated"] else ""),
            escape(", ".join(f"{key}={value}" for key, value in row["facts"].items())),
        )
    Console().print(table)
