"""`polysilicon explain OP`: which kernel serves an op on a device, and why no other does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from polysilicon.records import Fact


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(explain)


def explain(
    op: Annotated[str, typer.Argument(help="Name of the op, e.g. rms_norm.")],
    device: Annotated[
        str | None, typer.Option(help="cpu, or KIND:CHIP, KIND:ARCH; by default the current one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Activation dtype, torch's name.")] = "float32",
    fact: Annotated[
        list[str] | None, typer.Option(help="A fact of the problem, e.g. hidden=4096; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shows every kernel of an op: the one that serves and why, the others and why not."""
    from polysilicon.explaining import explain as ask

    facts = dict(_fact(text) for text in fact or [])
    explanation = ask(op, device=device, dtype=dtype, facts=facts)
    if as_json:
        typer.echo(json.dumps(explanation.as_dict()))
        return
    from rich.console import Console

    Console().print(explanation)


def _fact(text: str) -> tuple[str, Fact]:
    """`hidden=4096` → ("hidden", 4096); numbers, true, false and none by their spelling."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--fact {text!r}: expected KEY=VALUE, e.g. --fact hidden=4096")
    words: dict[str, Fact] = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return key, words[value.lower()]
    for number in (int, float):
        try:
            return key, number(value)
        except ValueError:
            continue
    return key, value
