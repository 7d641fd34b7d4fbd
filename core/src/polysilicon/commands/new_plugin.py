"""`polysilicon new-plugin NAME`: a vendor's package that passes the conformance suite as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(new_plugin)


def new_plugin(
    name: Annotated[str, typer.Argument(help="The vendor, e.g. acme: lower-case letters, digits.")],
    folder: Annotated[
        Path,
        typer.Option(
            "--dir", help="The folder in which polysilicon-NAME is made; here if not given."
        ),
    ] = Path(),
) -> None:
    """Writes the package `polysilicon-NAME`: detection, a layout, a kernel, tests.

    Its made-up chip is simulated on the CPU, so that the conformance suite passes at once.
    """
    from polysilicon.scaffold import write_plugin

    package = write_plugin(name, folder)
    files = sum(path.is_file() for path in package.rglob("*"))
    # With a leading ./ nothing takes the folder for the name of a package on an index.
    shown = package if package.is_absolute() else f"./{package}"
    typer.echo(f"wrote {shown}: {files} files. Next:")
    typer.echo(f"  pip install -e '{shown}[test]'")
    typer.echo(f"  pytest {shown}")
    typer.echo(f"  polysilicon explain rms_norm --device {name}:sim")
    typer.echo("docs/write-a-plugin.md in the repository of polysilicon goes on from here.")
