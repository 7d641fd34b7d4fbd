"""The command group of the good plugin."""

import typer

app = typer.Typer(help="What only this chip has.")


@app.callback()
def top() -> None:
    """Makes `tiles` a subcommand."""


@app.command()
def tiles() -> None:
    """Prints the tile."""
    typer.echo("64")
