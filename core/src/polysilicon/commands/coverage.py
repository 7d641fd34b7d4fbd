"""`polysilicon coverage`: which causal LMs of the installed Transformers adapt() handles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from polysilicon.adapt.coverage import Row


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(coverage)


def coverage(
    names: Annotated[
        list[str] | None, typer.Argument(help="Model types, e.g. llama; all by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/coverage.md.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; one a core by default.")
    ] = None,
    min_adapted: Annotated[
        float, typer.Option(min=0, max=100, help="Fail below this percentage of adapted.")
    ] = 0.0,
    max_failed: Annotated[
        float, typer.Option(min=0, max=100, help="Fail above this percentage of failed.")
    ] = 100.0,
) -> None:
    """Adapts a tiny random model of every causal-LM architecture and compares its logits.

    Ends with an error when any logits are wrong.
    """
    # Imported late, as everywhere in the command line: it takes torch and Transformers.
    from polysilicon.adapt import coverage as measured
    from polysilicon.adapt import tiny
    from polysilicon.adapt.coverage_page import page

    try:
        rows = _with_progress(
            len(names or tiny.names()),
            lambda progress: measured.coverage(names or (), jobs=jobs, progress=progress),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(measured.data(rows), indent=1))
    elif as_markdown:
        typer.echo(page(rows), nl=False)
    else:
        _print(rows, measured.totals(rows))
    broken = _broken_limits(measured.totals(rows), min_adapted, max_failed)
    if broken:
        typer.echo(f"Error: {broken}", err=True)
        raise typer.Exit(1)


def _broken_limits(totals: dict[str, int], min_adapted: float, max_failed: float) -> str:
    """What is outside the limits, as a sentence; empty where nothing is."""
    share = {status: 100 * count / totals["all"] for status, count in totals.items()}
    limits = (
        (totals["wrong"] > 0, f"{totals['wrong']} architectures are wrong, none may be"),
        (
            share["adapted"] < min_adapted,
            f"{share['adapted']:.1f} % are adapted, expected at least {min_adapted:g} %",
        ),
        (
            share["failed"] > max_failed,
            f"{share['failed']:.1f} % failed, expected at most {max_failed:g} %",
        ),
    )
    return "; ".join(text for is_broken, text in limits if is_broken)


def _with_progress(total: int, run: Callable[[Callable[[Row], None]], list[Row]]) -> list[Row]:
    """Runs with a bar on standard error, which a pipe does not see."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=total)

        def step(row: Row) -> None:
            bar.update(task, advance=1, description=f"{row.name}: {row.status}")

        return run(step)


def _print(rows: Sequence[Row], totals: dict[str, int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("architecture", "status", "engine", "float32", "bfloat16"):
        table.add_column(column, no_wrap=True)
    table.add_column("what stayed, or why", overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            row.status,
            row.engine.partition(":")[0],
            "" if row.float32 is None else f"{row.float32:.0e}",
            "" if row.bfloat16 is None else f"{row.bfloat16:.2f} ×",
            row.reason or "\n".join(row.kept),
        )
    console = Console()
    console.print(table)
    console.print(", ".join(f"{status} {count}" for status, count in totals.items()))
