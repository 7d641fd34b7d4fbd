"""What adapt() did, as data: one row for every module that it looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

Kind = Literal[
    "norm",
    "activation",
    "mlp",
    "linear",
    "embedding",
    "lm_head",
    "rotary",
    "attention",
    "block",
    "experts",
    "mixer",
    "other",
]

#: The kinds that must all be replaced for a model to count as fully adapted.
REPLACEABLE: frozenset[str] = frozenset(
    {"norm", "activation", "linear", "embedding", "lm_head", "rotary", "attention", "experts"}
    | {"mixer"}
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module of the model.

    Attributes:
        path: dotted name of the module in the model; `module:function` for a function that the
            module's code calls.
        kind: what it computes.
        status: `replaced`, or `kept` with the reason.
        replaced_by: our layer, empty for a kept module.
        op: the op that now does its work, empty for a kept module.
        reason: why it was kept; for a replaced one, what to know about it, if anything.
        error: largest error measured on the probes, relative to the largest output.
    """

    path: str
    kind: Kind
    status: Literal["replaced", "kept"]
    replaced_by: str = ""
    op: str = ""
    reason: str = ""
    error: float | None = None

    @property
    def module(self) -> str:
        """Dotted name of the module, also where the row is about a function of its code."""
        return self.path.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything adapt() did to one model.

    Attributes:
        architecture: class name of the model.
        dtype: dtype in which the probes ran, by torch's name.
        rows: one row a module, in the order of the module tree.
        paged: None when the engine can run the model, otherwise the reason why it can't.
    """

    architecture: str
    dtype: str
    rows: tuple[Row, ...]
    paged: str | None = None

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The modules that our layers stand for now."""
        return tuple(row for row in self.rows if row.status == "replaced")

    @property
    def kept(self) -> tuple[Row, ...]:
        """The modules that stayed as they were."""
        return tuple(row for row in self.rows if row.status == "kept")

    @property
    def missing(self) -> tuple[Row, ...]:
        """The kept modules of the kinds that adapt() is there to replace."""
        return tuple(row for row in self.kept if row.kind in REPLACEABLE)

    def data(self) -> dict[str, Any]:
        """The report as plain data, for `--json`."""
        return {
            "schema": 1,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "paged": self.paged,
            "modules": [asdict(row) for row in self.rows],
        }

    def summary(self) -> str:
        """One line: how many modules of each kind were replaced and kept."""
        replaced = Counter(row.kind for row in self.replaced)
        kept = Counter(row.kind for row in self.kept)
        parts = [f"{kind} {replaced[kind]}" for kind in replaced]
        text = f"{self.architecture}: replaced {', '.join(parts) or 'nothing'}"
        if kept:
            text += f"; kept {', '.join(f'{kind} {kept[kind]}' for kind in kept)}"
        return text

    def table(self) -> Table:
        """The report for a terminal: rows alike but for their layer number are shown once."""
        from rich.table import Table

        table = Table(title=self.summary(), title_justify="left")
        for column in ("module", "kind", "count", "replaced by", "op", "largest error", "reason"):
            table.add_column(column)
        for (path, kind, by, op, reason), rows in _grouped(self.rows).items():
            errors = [row.error for row in rows if row.error is not None]
            error = f"{max(errors):.1e}" if errors else ""
            table.add_row(path, kind, str(len(rows)), by or "kept", op, error, reason)
        return table


def _grouped(rows: tuple[Row, ...]) -> dict[tuple[str, str, str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in rows:
        path = ".".join("*" if part.isdigit() else part for part in row.path.split("."))
        key = (path, row.kind, row.replaced_by, row.op, row.reason)
        groups.setdefault(key, []).append(row)
    return groups
