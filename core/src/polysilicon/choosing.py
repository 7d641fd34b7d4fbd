"""The choice itself: which kernel serves which token counts, and what speaks against the others.

Precedence is declared: the most specific device, then rank, then an error that names both. An
argument lies in one layout for all token counts, so the kernel that goes first decides how.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polysilicon import ops
from polysilicon.calling import load_kernel, load_target
from polysilicon.errors import SelectionError
from polysilicon.notices import notice
from polysilicon.records import MOST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from polysilicon.ops.contract import Op
    from polysilicon.records import Device, Kernel, Layout, Problem, Provided
    from polysilicon.selection import Table

    #: Asked about a kernel that would be chosen: (kernel, problem, tokens) → reason against it.
    Judge = Callable[[Provided[Kernel], Problem, tuple[int, int]], str | None]

    #: Token counts, and what serves them.
    Cut = tuple[tuple[int, int], Provided[Kernel] | None]


@dataclass
class Round:
    """The state of one choice: every candidate, with the reason against it once there is one.

    `leaders` are the first kernels of each way to take the arguments, best first; `apart` holds the
    reasons that stand only as long as the arguments lie as the first of them takes them.
    """

    problem: Problem
    device: Device
    entries: list[Provided[Kernel]]
    against: dict[str, str]
    offered: Mapping[str, Layout]
    apart: dict[str, str] = field(default_factory=dict)
    leaders: list[Provided[Kernel]] = field(default_factory=list)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    chosen: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def fitting(
        self, tokens: tuple[int, int], *, also_apart: bool = False
    ) -> list[Provided[Kernel]]:
        """What could serve these tokens, as the arguments lie or also if they lay otherwise."""
        return [
            entry
            for entry in self.entries
            if entry.record.name not in self.against
            and (also_apart or entry.record.name not in self.apart)
            and _within(tokens, entry.record.tokens)
        ]

    def order(self, entry: Provided[Kernel]) -> tuple[int, int]:
        """What precedence compares: specificity, then rank."""
        return (specificity(entry.record, self.device) or 0, entry.record.rank)


def _within(inner: tuple[int, int], outer: tuple[int, int] | None) -> bool:
    return outer is None or (outer[0] <= inner[0] and inner[1] <= outer[1])


def specificity(kernel: Kernel, device: Device) -> int | None:
    """How closely a kernel's `device` names this device; None where it is for another."""
    if kernel.device.startswith("*:"):
        return 0 if device.facts.get(kernel.device[2:]) else None
    forms = {"*": 0, device.kind: 1, f"{device.kind}:{device.arch}": 2, device.name: 3}
    if kernel.device == device.kind == device.name:
        return 1  # a device without a model name: `cpu` is a kind, and no closer than that
    return forms.get(kernel.device)


def _reason_against(
    kernel: Kernel,
    problem: Problem,
    device: Device,
    table: Table,
    plain: Mapping[str, str],
    refused: Mapping[str, str],
) -> str | None:
    if kernel.name in table.disabled:
        return "turned off by POLYSILICON_DISABLE_KERNELS"
    if specificity(kernel, device) is None:
        if kernel.device.startswith("*:"):
            return f"is for devices with {kernel.device[2:]}, and {device.name} states none"
        return f"is for {kernel.device}, this is {device.name}"
    if kernel.dtypes and problem.dtype not in kernel.dtypes:
        return f"takes {', '.join(sorted(kernel.dtypes))}, not {problem.dtype}"
    low, high = kernel.tokens or problem.tokens
    if high < problem.tokens[0] or low > problem.tokens[1]:
        return f"serves {low}–{high} tokens, not {problem.tokens[0]}–{problem.tokens[1]}"
    if reason := _layouts_against(kernel, problem, table.offered(device), plain):
        return reason
    for argument, name in kernel.layouts.items():
        if name in refused:
            return f"takes {argument} in layout {name}, which {refused[name]}"
    if kernel.supports is None:
        return None
    try:
        answer: object = kernel.supports(problem)
    except Exception as error:
        return f"its supports() raised {type(error).__name__}: {error}"
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    return f"its supports() answered {answer!r}: expected None or the reason as text"


def _layouts_against(
    kernel: Kernel, problem: Problem, offered: Mapping[str, Layout], plain: Mapping[str, str]
) -> str | None:
    """What speaks against the layouts in which a kernel takes its arguments."""
    roles = ops.get(problem.op).roles
    for argument, name in kernel.layouts.items():
        takes = f"takes {argument} in layout {name}"
        layout = offered.get(name)
        if argument not in roles:
            known = ", ".join(roles) or "none"
            return f"{takes}, and {problem.op} gives that argument no role (with one: {known})"
        if layout is None:
            others = [other.name for other in offered.values() if other.role == roles[argument]]
            listed = ", ".join(others) or "none"
            return f"{takes}, which no plugin offers here (for {roles[argument]}: {listed})"
        if layout.role != roles[argument]:
            return f"{takes}, which is for {layout.role} and not for {roles[argument]}"
        if layout.pack is None:
            return f"{takes}, which has no pack: leave plain arguments out of Kernel.layouts"
        dtypes = str(layout.facts.get("dtypes") or problem.dtype).split()
        if problem.dtype not in dtypes:
            return f"{takes}, which takes {', '.join(dtypes)}, not {problem.dtype}"
        if argument in plain:
            return f"{takes}, and it must stay plain: {plain[argument]}"
    return None


def _check_keys(op: Op, problem: Problem) -> None:
    unknown = sorted(set(problem.facts) - op.keys)
    if unknown:
        raise ValueError(
            f"{op.name} has no fact {', '.join(map(repr, unknown))}: its facts are "
            f"{', '.join(sorted(op.keys)) or 'none'}"
        )


def _intervals(problem: Problem, kernels: Iterable[Kernel]) -> list[tuple[int, int]]:
    """The problem's token range, cut wherever some kernel's range begins or ends."""
    low, high = problem.tokens
    edges = {low, high + 1}
    for kernel in kernels:
        if kernel.tokens is not None:
            edges |= {
                edge for edge in (kernel.tokens[0], kernel.tokens[1] + 1) if low < edge <= high
            }
    rising = sorted(edges)
    return [(begin, end - 1) for begin, end in itertools.pairwise(rising)]


def _best(state: Round, tokens: tuple[int, int]) -> Provided[Kernel] | None:
    fitting = state.fitting(tokens)
    if not fitting:
        return None
    first = max(fitting, key=state.order)
    ties = [entry for entry in fitting if state.order(entry) == state.order(first)]
    if len(ties) > 1:
        raise _tie(state, span(tokens), ties)
    return first


def _tie(state: Round, tokens: str, ties: Sequence[Provided[Kernel]]) -> SelectionError:
    return SelectionError(
        f"two kernels tie for {state.problem.op} on {state.device.name} at {tokens} tokens: "
        + " and ".join(f"{e.record.name} ({e.origin}, rank {e.record.rank})" for e in ties)
        + f"; turn one off with POLYSILICON_DISABLE_KERNELS={ties[-1].record.name}, "
        "or give them different ranks"
    )


def span(tokens: tuple[int, int]) -> str:
    """`1–16`, `4`, or `≥17` where the end is open."""
    low, high = tokens
    return f"{low}" if low == high else f"{low}–{high}" if high < MOST_TOKENS else f"≥{low}"


def _choose(
    state: Round, tokens: tuple[int, int], judge: Judge | None, by_name: str | None
) -> Provided[Kernel] | None:
    """The best kernel for these tokens that imports and that the judge has nothing against."""
    while entry := _best(state, tokens):
        name = entry.record.name
        reason = None
        try:
            if name not in state.functions:
                for target in _layout_targets(entry.record, state.offered):
                    load_target(target)
                state.functions[name] = load_kernel(entry.record)
        except Exception as error:
            if by_name:
                raise SelectionError(f"kernel {name} could not be imported: {error}") from error
            reason = f"could not be imported: {type(error).__name__}: {error}"
            notice(
                f"kernel {name} of {entry.origin} {reason}. The next best kernel serves "
                f"{state.problem.op}; POLYSILICON_DISABLE_KERNELS={name} hides this",
                SelectionError,
            )
        if reason is None and judge is not None:
            reason = judge(entry, state.problem, tokens)
            if reason and by_name:
                raise SelectionError(f"kernel {name} was asked for by name and {reason}")
        if reason is None:
            return entry
        state.against[name] = reason
        # Earlier cuts may hold it: what is wrong in one bucket is not trusted in another.
        state.chosen.pop(name, None)
    return None


def _layout_targets(kernel: Kernel, offered: Mapping[str, Layout]) -> Iterator[str]:
    """What packs and unpacks a kernel's arguments: as necessary to it as its own target."""
    for name in kernel.layouts.values():
        yield from filter(None, (offered[name].pack, offered[name].unpack))


def candidates(
    problem: Problem,
    device: Device,
    table: Table,
    kernel: str | None = None,
    plain: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Round:
    """Every kernel of the problem's op with the reason against it, before anything is imported."""
    _check_keys(ops.get(problem.op), problem)
    entries = [entry for entry in table.kernels[device.name] if entry.record.op == problem.op]
    against = {}
    for entry in entries:
        reason = _reason_against(entry.record, problem, device, table, plain or {}, refused or {})
        if reason is None and kernel is not None and entry.record.name != kernel:
            reason = f"{kernel} was asked for by name"
        if reason is not None:
            against[entry.record.name] = reason
    return Round(problem, device, entries, against, table.offered(device))


def settle(state: Round, judge: Judge | None = None, by_name: str | None = None) -> list[Cut]:
    """Chooses for every token interval; None where nothing is left.

    An argument lies in one layout for all token counts. The kernel that precedence puts first
    overall says in which; it needs others of its kind where it does not serve itself. Where those
    leave a gap, all that take the argument so are refused and the choice is made again.
    """
    while True:
        leaders = state.leaders = _leaders(state)
        _set_apart(state)
        before = len(state.against)
        cuts = _settle_as_they_lie(state, judge, by_name)
        if len(state.against) > before and len(leaders) > 1:
            continue  # the leader may be gone, and with it the reason for its layout
        missing = [tokens for tokens, entry in cuts if entry is None]
        if not missing or len(leaders) < 2:
            return cuts
        first = leaders[0].record
        gap = ", ".join(map(span, missing))
        for entry in state.entries:
            if entry.record.layouts == first.layouts and entry.record.name not in state.against:
                state.against[entry.record.name] = (
                    f"{_taken(first, leaders)}, and no kernel takes that at {gap} tokens"
                )


def _leaders(state: Round) -> list[Provided[Kernel]]:
    """The first kernel of each way to take the arguments, best first; a tie goes to few tokens."""
    left = [entry for entry in state.entries if entry.record.name not in state.against]
    low = state.problem.tokens[0]
    left.sort(key=lambda e: (*(-n for n in state.order(e)), (e.record.tokens or (low, 0))[0]))
    leaders: list[Provided[Kernel]] = []
    for entry in left:
        if all(entry.record.layouts != leader.record.layouts for leader in leaders):
            leaders.append(entry)
    for rival in leaders[1:]:
        both = _overlap(leaders[0].record, rival.record, state.problem)
        if both is not None and state.order(rival) == state.order(leaders[0]):
            raise _tie(state, span(both), [leaders[0], rival])
    return leaders


def _overlap(one: Kernel, other: Kernel, problem: Problem) -> tuple[int, int] | None:
    spans = (one.tokens or problem.tokens, other.tokens or problem.tokens, problem.tokens)
    low, high = max(low for low, _ in spans), min(high for _, high in spans)
    return (low, high) if low <= high else None


def _set_apart(state: Round) -> None:
    state.apart.clear()
    for entry in state.entries if state.leaders else ():
        first, other = state.leaders[0].record, entry.record
        if other.layouts != first.layouts and other.name not in state.against:
            state.apart[other.name] = (
                f"{_taken(other, state.leaders)}; {first.name}, which goes first, "
                f"{_taken(first, state.leaders)}"
            )


def _taken(kernel: Kernel, leaders: Sequence[Provided[Kernel]]) -> str:
    """`takes weight in layout acme.tiles`, or `takes weight plain`."""
    arguments = sorted({name for leader in leaders for name in leader.record.layouts})
    return "takes " + ", ".join(
        f"{name} in layout {kernel.layouts[name]}" if name in kernel.layouts else f"{name} plain"
        for name in arguments
    )


def _settle_as_they_lie(state: Round, judge: Judge | None, by_name: str | None) -> list[Cut]:
    """The choice among kernels that take their arguments alike."""
    while True:
        before = len(state.against)
        state.chosen.clear()
        fits = [
            entry.record
            for entry in state.entries
            if entry.record.name not in state.against and entry.record.name not in state.apart
        ]
        cuts: list[Cut] = []
        for tokens in _intervals(state.problem, fits):
            entry = _choose(state, tokens, judge, by_name)
            if entry is not None:
                state.chosen.setdefault(entry.record.name, []).append(tokens)
                state.why[entry.record.name] = _reason_for(state, entry, tokens)
            if cuts and cuts[-1][1] is entry:
                cuts[-1] = ((cuts[-1][0][0], tokens[1]), entry)
            else:
                cuts.append((tokens, entry))
        if len(state.against) == before:  # nothing was refused on the way: every cut stands
            return cuts


def _reason_for(state: Round, entry: Provided[Kernel], tokens: tuple[int, int]) -> str:
    kernel = entry.record
    note = f": {kernel.note}" if kernel.note else ""
    rivals = [other for other in state.fitting(tokens, also_apart=True) if other is not entry]
    if not rivals:
        return f"the only one that fits{note}"
    best = max(map(state.order, rivals))
    if state.order(entry) <= best:  # what ranks higher here takes its arguments otherwise
        leader = state.leaders[0].record
        return f"{_taken(kernel, state.leaders)}, as {leader.name}, which goes first{note}"
    if best[0] < state.order(entry)[0]:
        return f"most specific device ({kernel.device}){note}"
    return f"highest rank ({kernel.rank}){note}"
