"""Budget files: what a kernel may cost on a chip, committed, so that a regression is a diff.

`<kernel>.budget.json` lies beside the kernel's source: toolchain → architecture → variant → facts.
Compilers of one minor version are deterministic, so the facts are compared exactly: an improvement
is written down too, or the next regression would hide in it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from polysilicon.records import Compiled, Device, Fact

    Budget = dict[str, dict[str, dict[str, dict[str, Fact]]]]

#: The fact that says which compiler, down to the minor version, e.g. `triton 3.9`.
TOOLCHAIN = "toolchain"


def path_of(folder: Path, kernel: str) -> Path:
    """The budget file of a kernel."""
    return folder / f"{kernel.replace(':', '_')}.budget.json"


def write(folder: Path, device: Device, made: Sequence[Compiled]) -> None:
    """Sets the budget of one kernel on one architecture to what was compiled; keeps the rest.

    A folder that is missing is made.

    Raises:
        ValueError: what was compiled does not say which compiler made it.
    """
    kernel = made[0].kernel
    path = path_of(folder, kernel)
    budgets = _read(path)
    variants = {compiled.variant: _facts(compiled) for compiled in made}
    budgets.setdefault(_toolchain(made[0]), {})[_architecture(device)] = variants
    data = {"schema": 1, "kernel": kernel, "budgets": budgets}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def differences(folder: Path, device: Device, made: Sequence[Compiled]) -> dict[str, list[str]]:
    """What one kernel's variants differ in from their budget: variant → a sentence a difference.

    Raises:
        ValueError: a compiled variant does not say which compiler made it.
    """
    path = path_of(folder, made[0].kernel)
    toolchain, architecture = _toolchain(made[0]), _architecture(device)
    budget = _read(path).get(toolchain, {}).get(architecture)
    if budget is None:
        text = f"has no budget for {toolchain} on {architecture} in {path}"
        return {compiled.variant: [text] for compiled in made}
    found = {
        compiled.variant: _compared(_facts(compiled), budget.get(compiled.variant))
        for compiled in made
    }
    for variant in sorted(set(budget) - set(found)):
        found[variant] = [f"is in the budget {path}, but was not compiled"]
    return {variant: texts for variant, texts in found.items() if texts}


def _compared(facts: Mapping[str, Fact], budget: Mapping[str, Fact] | None) -> list[str]:
    if budget is None:
        return ["has no budget"]
    keys = sorted(facts.keys() | budget.keys())
    return [
        f"{key} is {facts.get(key)}, its budget says {budget.get(key)}"
        for key in keys
        if facts.get(key) != budget.get(key)
    ]


def _facts(compiled: Compiled) -> dict[str, Fact]:
    return {key: value for key, value in compiled.facts.items() if key != TOOLCHAIN}


def _toolchain(compiled: Compiled) -> str:
    toolchain = compiled.facts.get(TOOLCHAIN)
    if not isinstance(toolchain, str):
        raise ValueError(
            f"{compiled.kernel} states no fact {TOOLCHAIN!r}, e.g. 'triton 3.9', which a budget "
            "is kept by: its offline function has to add it"
        )
    return toolchain


def _architecture(device: Device) -> str:
    return device.arch or device.name


def _read(path: Path) -> Budget:
    if not path.is_file():
        return {}
    try:
        data: Any = json.loads(path.read_text())
        found: Budget = data["budgets"] if data["schema"] == 1 else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a budget file: {type(error).__name__}: {error}; delete it and write it "
            "anew with --write-budget"
        ) from error
    return found
