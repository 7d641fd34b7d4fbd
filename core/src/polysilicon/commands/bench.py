"""`polysilicon bench …`: the group that the benchmarks' modules add their commands to."""

from __future__ import annotations

import typer

bench = typer.Typer(
    no_args_is_help=True, help="Benchmarks: they print what they measured and never fail."
)


def register(app: typer.Typer) -> None:
    """Adds the group."""
    app.add_typer(bench, name="bench")
