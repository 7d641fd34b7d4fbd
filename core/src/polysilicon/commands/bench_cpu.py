"""`polysilicon bench cpu`: our engine next to Transformers, on the same weights, in one run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from polysilicon.commands.bench import bench


def register(app: typer.Typer) -> None:
    """Adds the command to `polysilicon bench`."""
    del app  # it belongs to the group
    bench.command("cpu")(cpu)


def cpu(
    model: Annotated[str, typer.Option(help="What `polysilicon run --model` takes.")] = "smollm2",
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round: shows that it runs, measures nothing.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option(help="Also compare both sides compiled; compiling takes minutes.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures decode, prefill and mixed requests against Transformers, and memory bandwidth."""
    from rich.console import Console

    from polysilicon.bench import cpu as measured

    plan = measured.QUICK if quick else measured.Plan()
    with Console(stderr=True).status("starting") as status:
        result = measured.measure(model, plan=plan, compiled=compiled, say=status.update)
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    Console().print(result)
