"""What the four suites share: cases, findings looked at once, gaps, and no overriding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest

from polysilicon import ops
from polysilicon.errors import PolysiliconError
from polysilicon.testing.findings import close, gap_for, gaps_of, nothing, stale
from polysilicon.testing.subject import DeviceUnderTest, Subject, environment, subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polysilicon.testing.findings import Finding


#: What kept a suite from testing anything → the test that failed with it; the others say so.
_failed_with: pytest.StashKey[dict[str, str]] = pytest.StashKey()


class Case(Protocol):
    """Something that a suite tests; `id` names it in pytest."""

    @property
    def id(self) -> str: ...


class Suite(DeviceUnderTest):
    """Base of the suites.

    A suite states its `cases()` and makes all findings of one case in `look()`; its tests each
    settle one check of one case. What fails and is a known gap is an expected failure.
    """

    #: Case id → its findings; one dictionary a class, looked at by the report.
    looked_at: ClassVar[dict[str, tuple[Finding, ...]]]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.looked_at = {}
        changed = sorted(name for name in _names_of_suites(cls) if not _ours(_owner(cls, name)))
        if changed:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(changed)} of the conformance suite: list "
                "what fails in gaps, with a reason, instead"
            )

    # --- for a suite to state ------------------------------------------------------------------

    @classmethod
    def cases(cls, found: Subject) -> Sequence[Case]:
        """All cases of the device under test."""
        raise NotImplementedError  # each suite states its own

    @classmethod
    def look(cls, found: Subject, case: Any) -> tuple[Finding, ...]:
        """Every finding of one case."""
        raise NotImplementedError  # each suite states its own

    @classmethod
    def why_not(cls, found: Subject) -> str:
        """Why the suite can't run on this machine; empty where it can."""
        return found.why_not

    @classmethod
    def untested(cls, found: Subject) -> str:
        """Why it is wrong that the suite has no cases; empty where there need be none."""
        return ""

    @classmethod
    def own_names(cls, found: Subject) -> set[str]:
        """Names that gaps of this suite may begin with."""
        raise NotImplementedError  # each suite states its own

    # --- what runs them ------------------------------------------------------------------------

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """One test a case, asked of the plugin when pytest collects."""
        if "case" not in metafunc.fixturenames:
            return
        try:
            found = subject(cls)
            cases = [] if cls.why_not(found) else [*cls.cases(found)]
        except PolysiliconError:
            cases = []  # the fixture below fails with the reason
        metafunc.parametrize("case", cases or [None], ids=[c.id for c in cases] or ["none"])

    @pytest.fixture(autouse=True)
    def _available(self, request: pytest.FixtureRequest) -> None:
        found, text = None, ""
        try:
            found = subject(type(self))
        except PolysiliconError as error:
            text = str(error)
        if found is None:  # outside of the handler: one line, and no traceback behind it
            _fail_once(request, text)
        elif reason := self.why_not(found):
            pytest.skip(reason)
        elif "case" in request.fixturenames and request.getfixturevalue("case") is None:
            if text := self.untested(found):
                _fail_once(request, text)
            pytest.skip(f"plugin {self.plugin} has nothing for {type(self).__name__} to test")

    @classmethod
    def findings(cls, case: Case) -> tuple[Finding, ...]:
        """The findings of a case, made at the first call."""
        if case.id not in cls.looked_at:
            with environment(cls):
                cls.looked_at[case.id] = cls.look(subject(cls), case)
        return cls.looked_at[case.id]

    def settle(self, case: Case, check: str) -> None:
        """Passes, skips, fails, or fails as expected, by one check's findings in a case."""
        found = [finding for finding in self.findings(case) if finding.check == check]
        failed = [finding for finding in found if finding.text]
        gaps = gaps_of(self.gaps)
        unexpected = [finding for finding in failed if gap_for(finding, gaps) is None]
        if unexpected:
            shown = "\n".join(map(str, unexpected[:8]))
            more = len(unexpected) - 8
            pytest.fail(shown + (f"\n… and {more} more" if more > 0 else ""), pytrace=False)
        if failed:
            known = (gap_for(finding, gaps) for finding in failed)
            pytest.xfail("; ".join(sorted({gap.reason for gap in known if gap})))
        if all(finding.skipped for finding in found):
            pytest.skip(found[0].skipped if found else "it could not be looked at")

    def test_known_gaps_still_fail(self) -> None:
        """Each gap speaks of something that fails. If not: delete it, or mend its key."""
        cls = type(self)
        found = subject(cls)
        own = cls.own_names(found)
        gaps = [gap for gap in gaps_of(self.gaps) if gap.name in own]
        all_findings = [
            finding for case in (cls.cases(found) if gaps else ()) for finding in cls.findings(case)
        ]
        wrong = [text for gap in gaps if (text := stale(gap, all_findings))]
        known = _all_names(found)
        unknown = [gap for gap in gaps_of(self.gaps) if gap.name not in known]
        wrong += [nothing(gap, close(gap.name, known)) for gap in unknown]
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)


def _fail_once(request: pytest.FixtureRequest, text: str) -> None:
    """Fails the first test of a run that cannot be for this reason, and skips the rest."""
    told = request.config.stash.setdefault(_failed_with, {})
    first = told.setdefault(text, request.node.nodeid)
    if first == request.node.nodeid:
        pytest.fail(text, pytrace=False)
    pytest.skip(f"nothing could be tested, see the failure of {first}")


def _ours(cls: type) -> bool:
    return cls.__module__.startswith("polysilicon.testing.")


def _names_of_suites(cls: type[Suite]) -> set[str]:
    """Everything that the suites define and no vendor may replace: tests, and what runs them."""
    suites = (base for base in cls.__mro__ if _ours(base) and issubclass(base, Suite))
    names = {name for base in suites for name in vars(base) if not name.startswith("__")}
    return names - {"looked_at"}


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def _all_names(found: Subject) -> set[str]:
    """Every name that a gap of any suite may begin with."""
    from polysilicon.testing.layer_cases import LAYERS

    kernels = {kernel.name for kernel in found.kernels}
    return {"plugin", *ops.NAMES, *kernels, *LAYERS, *(layout.name for layout in found.layouts)}
