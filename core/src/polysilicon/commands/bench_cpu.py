"""`polysilicon bench cpu`: ours next to Transformers, on the same weights, in one run."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from polysilicon.commands.bench import bench


class Only(StrEnum):
    """What to measure."""

    models = "models"
    parts = "parts"


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
    only: Annotated[
        Only | None, typer.Option(help="Measure whole models, or parts of models, alone.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode, prefill and mixed requests, mixers and experts: ours next to Transformers' own."""
    from rich.console import Console

    from polysilicon.bench import cpu as measured
    from polysilicon.bench import parts

    result, rows = None, []
    with Console(stderr=True).status("starting") as status:
        if only != Only.parts:
            plan = measured.QUICK if quick else measured.Plan()
            result = measured.measure(model, plan=plan, compiled=compiled, say=status.update)
        if only != Only.models:
            rows = parts.measure_parts(rounds=1 if quick else 11, say=status.update)
    if as_json:
        data = {"schema": 1} if result is None else result.as_dict()
        typer.echo(json.dumps(data | {"parts": [row.as_dict() for row in rows]}))
        return
    shown = [*([] if result is None else [result]), *([parts.table_of(rows)] if rows else [])]
    Console().print(*shown, sep="\n")
