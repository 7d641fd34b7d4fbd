"""What a check found, and how known gaps name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check in one case.

    Attributes:
        names: what gaps may call it, e.g. the kernel's name and the op's.
        details: what may stand in a gap's brackets, e.g. the dtype and the sample's name.
        check: what was looked at, itself a detail, e.g. `values`.
        text: what is wrong; empty where nothing is.
        skipped: why it was not looked at; empty where it was.
    """

    names: tuple[str, ...]
    details: tuple[str, ...]
    check: str
    text: str = ""
    skipped: str = ""

    @property
    def state(self) -> str:
        """`failed`, `skipped` or `passed`."""
        return "failed" if self.text else "skipped" if self.skipped else "passed"

    def __str__(self) -> str:
        return f"{self.names[0]}[{', '.join(self.details)}]: {self.text or self.skipped or 'right'}"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A known gap: `name[detail, detail]` and the reason."""

    key: str
    reason: str

    @property
    def name(self) -> str:
        """The part before the brackets."""
        return self.key.partition("[")[0].strip()

    def matches(self, finding: Finding) -> bool:
        """Whether this gap speaks of that finding."""
        if self.name not in finding.names:
            return False
        inside = self.key.partition("[")[2].removesuffix("]")
        known = (*finding.details, finding.check)
        # Longest first: a detail such as "sections (8, 12, 12)" holds commas of its own.
        for detail in sorted(known, key=len, reverse=True):
            inside = f", {inside}, ".replace(f", {detail}, ", ", ").strip(", ")
        return not inside


def gaps_of(declared: Mapping[str, str]) -> tuple[Gap, ...]:
    """The gaps that a device under test declares.

    Raises:
        ValueError: a gap has no reason, or its brackets are not closed.
    """
    for key, reason in declared.items():
        if not reason.strip():
            raise ValueError(f"gap {key!r} has no reason: say why, and where it is followed up")
        if ("[" in key) != key.endswith("]"):
            raise ValueError(f"gap {key!r}: expected NAME or NAME[DETAIL, DETAIL]")
    return tuple(Gap(key=key, reason=reason) for key, reason in declared.items())


def gap_for(finding: Finding, gaps: Iterable[Gap]) -> Gap | None:
    """The first gap that speaks of a finding."""
    return next((gap for gap in gaps if gap.matches(finding)), None)


def stale(gap: Gap, findings: Iterable[Finding]) -> str | None:
    """What is wrong with a gap, given every finding of its suite; None where it is a gap."""
    matched = [finding for finding in findings if gap.matches(finding)]
    looked_at = [finding for finding in matched if finding.state != "skipped"]
    if not matched:
        return f"gap {gap.key!r} matches nothing: mend the key or delete it"
    if looked_at and not any(finding.text for finding in looked_at):
        return f"gap {gap.key!r} passes now ({gap.reason}): delete it"
    return None
