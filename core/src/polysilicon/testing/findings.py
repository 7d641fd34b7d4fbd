"""What a check found, and how known gaps name it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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
        # As a gap would write it: the brackets of a failure can be copied into a key.
        inside = ", ".join((*self.details, self.check))
        return f"{self.names[0]}[{inside}]: {self.text or self.skipped or 'right'}"


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
        return self.name in finding.names and not self.left((*finding.details, finding.check))

    def left(self, known: Iterable[str]) -> str:
        """What stands in the brackets beside these details."""
        inside = self.key.partition("[")[2].removesuffix("]")
        # Longest first: a detail such as "sections (8, 12, 12)" holds commas of its own.
        for detail in sorted(known, key=len, reverse=True):
            inside = f", {inside}, ".replace(f", {detail}, ", ", ").strip(", ")
        return inside


def gaps_of(declared: Mapping[str, str]) -> tuple[Gap, ...]:
    """The gaps that a device under test declares.

    Raises:
        TypeError: they are not texts by key, a gap has no reason, or its brackets are not closed.
    """
    if not isinstance(declared, Mapping):
        raise TypeError(f"gaps is {declared!r}: expected {{'NAME[DETAIL]': 'why it fails'}}")
    for key, reason in declared.items():
        if not isinstance(key, str) or not isinstance(reason, str):
            raise TypeError(f"gap {key!r} has the reason {reason!r}: expected a text, why it fails")
        if not reason.strip():
            raise TypeError(f"gap {key!r} has no reason: say why, and where it is followed up")
        if ("[" in key) != key.endswith("]") or not key.partition("[")[0].strip():
            raise TypeError(f"gap {key!r}: expected NAME or NAME[DETAIL, DETAIL]")
    return tuple(Gap(key=key, reason=reason) for key, reason in declared.items())


def gap_for(finding: Finding, gaps: Iterable[Gap]) -> Gap | None:
    """The first gap that speaks of a finding."""
    return next((gap for gap in gaps if gap.matches(finding)), None)


def stale(gap: Gap, findings: Sequence[Finding]) -> str | None:
    """What is wrong with a gap, given every finding of its suite; None where it is a gap."""
    matched = [finding for finding in findings if gap.matches(finding)]
    looked_at = [finding for finding in matched if finding.state != "skipped"]
    if not matched:
        return nothing(gap, _instead(gap, findings))
    if looked_at and not any(finding.text for finding in looked_at):
        return f"gap {gap.key!r} passes now ({gap.reason}): delete it"
    return None


def nothing(gap: Gap, instead: str) -> str:
    """The text for a gap that matches nothing, with what it may have meant."""
    return f"gap {gap.key!r} matches nothing{instead}: mend the key or delete it"


def close(wanted: str, known: Iterable[str]) -> str:
    """` (did you mean …?)` with what is spelt much like it; empty where nothing is."""
    alike = difflib.get_close_matches(wanted, sorted(set(known)))
    return f" (did you mean {' or '.join(map(repr, alike))}?)" if alike else ""


def _instead(gap: Gap, findings: Iterable[Finding]) -> str:
    """What the findings of a gap's name offer for its brackets."""
    own = [finding for finding in findings if gap.name in finding.names]
    checks = sorted({finding.check for finding in own})
    known = {*checks, *(detail for finding in own for detail in finding.details)}
    left = gap.left(known)
    if not left:
        return ", as no one finding has all of its details"
    return f", {left!r} is no detail{close(left, known)}; the checks are {', '.join(checks)}"
