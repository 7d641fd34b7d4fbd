"""`explain()`: every candidate of an op with what became of it and why, as data, text and table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polysilicon import choosing, ops, selection
from polysilicon.records import MOST_TOKENS, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table as RichTable

    from polysilicon.records import Device, Fact
    from polysilicon.selection import Candidate, Table


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why which kernel serves a problem on a device. `str()` is the table, `as_dict()` the data."""

    problem: Problem
    device: Device
    candidates: tuple[Candidate, ...]

    @property
    def layouts(self) -> dict[str, str]:
        """Argument → name of the layout in which the chosen kernels take it; others are plain."""
        chosen = [c.provided.record for c in self.candidates if c.chosen]
        return dict(chosen[0].layouts) if chosen else {}

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON of `polysilicon explain` (docs/json.md)."""
        return {
            "schema": 1,
            "op": self.problem.op,
            "device": self.device.name,
            "dtype": self.problem.dtype,
            "tokens": list(self.problem.tokens),
            "facts": dict(self.problem.facts),
            "layouts": self.layouts,
            "candidates": [candidate_dict(candidate) for candidate in self.candidates],
        }

    def __rich__(self) -> RichTable:
        return _rich_table(_title(self), self.candidates)

    def __str__(self) -> str:
        return _text(self)


def explain(
    what: str | Problem,
    *,
    device: Device | str | None = None,
    table: Table | None = None,
    dtype: str = "float32",
    facts: Mapping[str, Fact] | None = None,
) -> Explanation:
    """Every kernel that could serve an op, or exactly this problem, and why or why not.

    Example:
        >>> explain("rms_norm", device="cpu").candidates[0].provided.record.name
        'rms_norm.torch'

    Raises:
        ValueError: there is no such op, or it has no such fact.
        DeviceError: there is no such device.
    """
    from polysilicon.devices import resolve

    if isinstance(what, str):
        ops.get(what)  # the plain "there is no op …" error comes before the record's own checks
        what = Problem(op=what, dtype=dtype, facts=facts or {})
    found = resolve(device, table)
    state = choosing.candidates(what, found, table or selection.current_table())
    choosing.settle(state)
    return Explanation(problem=what, device=found, candidates=selection.outcome(state))


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """One candidate as JSON data; `chosen` lists [lowest, highest] token counts."""
    kernel = candidate.provided.record
    return {
        "kernel": kernel.name,
        "origin": str(candidate.provided.origin),
        "device": kernel.device,
        "rank": kernel.rank,
        "form": kernel.form,
        "layouts": dict(kernel.layouts),
        "chosen": [list(span) for span in candidate.chosen],
        "reason": candidate.reason,
    }


def nothing_fits(
    problem: Problem,
    device: Device,
    candidates: tuple[Candidate, ...],
    missing: Sequence[tuple[int, int]],
) -> str:
    """The error's text: what was asked for, and every candidate with the reason against it."""
    spans = ", ".join(span_text(tokens) for tokens in missing)
    told = _text(Explanation(problem=problem, device=device, candidates=candidates))
    return f"no kernel serves {problem.op} on {device.name} for {spans} tokens:\n{told}"


def span_text(tokens: tuple[int, int]) -> str:
    """The range as tables show it: `all` where it leaves nothing out."""
    low, high = tokens
    return "all" if low == 1 and high >= MOST_TOKENS else choosing.span(tokens)


def _title(explanation: Explanation) -> str:
    problem, device = explanation.problem, explanation.device
    facts = "".join(f" {key}={value}" for key, value in sorted(problem.facts.items()))
    labels = "" if device.present else " (forced, absent)"
    labels += " (simulated)" if device.simulated else ""
    packed = "".join(f", {name} in {layout}" for name, layout in explanation.layouts.items())
    return f"{problem.op} {problem.dtype}{facts} on {device.name}{labels}{packed}"


def _rich_table(title: str, candidates: Sequence[Candidate]) -> RichTable:
    from rich.markup import escape
    from rich.table import Table as RichTable

    shown = RichTable(title=title, title_justify="left")
    # A name cut short could not be pasted into POLYSILICON_DISABLE_KERNELS.
    for heading in ("kernel", "tokens", "plugin", "for", "rank"):
        shown.add_column(heading, no_wrap=True)
    shown.add_column("reason", overflow="fold", min_width=12)
    for candidate in candidates:
        kernel = candidate.provided.record
        spans = ", ".join(span_text(span) for span in candidate.chosen) or "–"
        shown.add_row(
            kernel.name,
            spans,
            candidate.provided.origin.plugin,
            kernel.device,
            str(kernel.rank),
            escape(candidate.reason),
            style="bold" if candidate.chosen else "dim",
        )
    return shown


def _text(explanation: Explanation) -> str:
    from rich.console import Console

    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(explanation.__rich__())
    return capture.get().rstrip()
