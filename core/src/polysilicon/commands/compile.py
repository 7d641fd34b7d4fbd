"""`polysilicon compile [OP…]`: what the compiler makes of a device's kernels, without running."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 typer reads it from the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from polysilicon.records import Compiled, Device, Kernel, Provided

#: Heading of a column and the fact in it, as `Compiled.facts` spells it.
COLUMNS = {
    "registers": "registers",
    "spills": "spills",
    "shared": "shared_bytes",
    "code": "code_bytes",
    "matrix instruction": "matrix_instruction",
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(compile)


def compile(
    op: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="Ops to compile; all if none.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="KIND:CHIP or KIND:ARCH, here or not; default: current.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    write_budget: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a budget file for each kernel into this folder; made if missing.",
        ),
    ] = None,
    check_budget: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare with the budget files of this folder."),
    ] = None,
) -> None:
    """Compiles the kernels of a chip that need not be on this machine; runs none of them.

    The exit status is 1 if any kernel has a problem.
    """
    from polysilicon.devices import resolve

    folder = _folder(write_budget, check_budget)
    found = resolve(device)
    entries = _entries(found, op or [])
    made = _compile(found, list(entries))
    if folder is not None:
        made = {name: _budgeted(found, m, folder, write_budget) for name, m in made.items()}
    rows = [_row(entries[name], compiled) for name, all_ in made.items() for compiled in all_]
    if as_json:
        typer.echo(json.dumps({"schema": 1, "device": found.name, "kernels": rows}))
    else:
        _show(rows, found)
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)


def _folder(write_budget: Path | None, check_budget: Path | None) -> Path | None:
    if write_budget is not None and check_budget is not None:
        raise ValueError("--write-budget and --check-budget can't be used together: give one")
    if check_budget is not None and not check_budget.is_dir():
        raise ValueError(
            f"{check_budget} is no folder: --write-budget writes budget files, which lie beside "
            "the kernels' source"
        )
    if write_budget is not None and write_budget.exists() and not write_budget.is_dir():
        raise ValueError(f"{write_budget} is no folder: give one for the budget files")
    return write_budget or check_budget


def _entries(device: Device, ops: Sequence[str]) -> dict[str, Provided[Kernel]]:
    """The kernels to compile by name."""
    from polysilicon.choosing import specificity
    from polysilicon.ops import NAMES
    from polysilicon.selection import current_table

    for name in ops:
        if name not in NAMES:
            raise ValueError(f"there is no op {name!r}: one of {', '.join(NAMES)}")
    table = current_table()
    entries = {
        entry.record.name: entry
        for entry in table.kernels[device.name]
        if entry.record.offline is not None
        and entry.record.op in (ops or NAMES)
        and entry.record.name not in table.disabled
        and specificity(entry.record, device) is not None
    }
    if not entries:
        of = f" of {', '.join(ops)}" if ops else ""
        own = [
            entry.record.name
            for entry in table.kernels[device.name]
            if entry.origin.plugin == device.kind and entry.record.op in (ops or NAMES)
        ]
        if own:
            raise ValueError(
                f"no kernel{of} for {device.name} compiles offline: none of the kernels of plugin "
                f"{device.kind} ({', '.join(own)}) names Kernel.offline for it"
            )
        raise ValueError(
            f"no kernel{of} for {device.name} compiles offline: name a chip whose plugin is "
            "installed, e.g. --device KIND:CHIP (`polysilicon plugins` lists the plugins)"
        )
    return entries


def _compile(device: Device, names: Sequence[str]) -> dict[str, list[Compiled]]:
    from rich.console import Console

    from polysilicon.offline.running import compile_kernels

    made: dict[str, list[Compiled]] = {name: [] for name in names}
    # A spinner on a terminal, nothing elsewhere; never on standard output.
    with Console(stderr=True).status("starting the compiler") as status:
        started = compile_kernels(
            device, names, on_start=lambda name: status.update(f"compiling {name}")
        )
        for compiled in started:
            made[compiled.kernel].append(compiled)
    return made


def _budgeted(
    device: Device, made: list[Compiled], folder: Path, write_budget: Path | None
) -> list[Compiled]:
    """What was compiled, with what it differs in from its budget, or with its budget written."""
    from dataclasses import replace

    from polysilicon.offline import budgets
    from polysilicon.records import Compiled

    if any(compiled.problems for compiled in made):
        return made  # there is something to mend before its cost means anything
    if write_budget is not None:
        budgets.write(folder, device, made)
        return made
    against = budgets.differences(folder, device, made)
    compared = [replace(m, problems=tuple(against.pop(m.variant, ()))) for m in made]
    return compared + [
        Compiled(kernel=made[0].kernel, variant=variant, seconds=0.0, problems=tuple(texts))
        for variant, texts in against.items()
    ]


def _row(entry: Provided[Kernel], compiled: Compiled) -> dict[str, Any]:
    return {
        "op": entry.record.op,
        "kernel": compiled.kernel,
        "plugin": entry.origin.plugin,
        "origin": str(entry.origin),
        "variant": compiled.variant,
        "seconds": compiled.seconds,
        "facts": dict(compiled.facts),
        "problems": list(compiled.problems),
    }


def _show(rows: list[dict[str, Any]], device: Device) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        console.print(_table(kernel, [row for row in rows if row["kernel"] == kernel]))
    for row in rows:
        for problem in row["problems"]:
            console.print(f"[red]{row['kernel']}[/]", escape(f"{row['variant']}: {problem}"))
    bad = sum(bool(row["problems"]) for row in rows)
    console.print(
        f"{len(rows)} variants for {device.name}, {bad} with problems: compiled offline, not run"
    )


def _table(kernel: str, rows: list[dict[str, Any]]) -> Table:
    """One kernel's variants, narrow enough for 80 columns; `--json` has the other facts too."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=kernel, title_justify="left", box=None, pad_edge=False)
    shown.add_column("variant", overflow="fold")
    stated = {fact for row in rows for fact in row["facts"]}
    columns = {heading: fact for heading, fact in COLUMNS.items() if fact in stated}
    for heading in ("seconds", *columns):
        shown.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        facts = [row["facts"].get(fact) for fact in columns.values()]
        shown.add_row(
            escape(row["variant"]),
            f"{row['seconds']:.1f}",
            *("" if fact is None else escape(str(fact)) for fact in facts),
            style="red" if row["problems"] else "",
        )
    return shown
