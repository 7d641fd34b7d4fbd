"""`polysilicon bench dispatch`: what a bound op costs per call, next to its alternatives."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from polysilicon.commands.bench import bench


def register(app: typer.Typer) -> None:
    """Adds the command to `polysilicon bench`."""
    del app  # it belongs to the group
    bench.command("dispatch")(dispatch)


def dispatch(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 30,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each form in a round.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures the cost of one call: plain, bound, method, module, torch.library, pluggy."""
    from polysilicon.bench import dispatch as measured

    result = measured.measure(rounds=rounds, calls=calls)
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    from rich.console import Console

    Console().print(result)
