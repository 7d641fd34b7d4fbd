"""The frozen table of what there is, and `bind()`: kernels for a problem, once.

Every kernel that isn't chosen has a reason, and an automatic choice that cannot be imported falls
back with one warning; a kernel asked for by name fails instead. `choosing.py` has the rules.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polysilicon import ops
from polysilicon.calling import callable_for
from polysilicon.choosing import candidates, settle
from polysilicon.errors import SelectionError
from polysilicon.notices import notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from polysilicon.choosing import Judge, Round
    from polysilicon.records import Device, Kernel, Layout, Problem, Provided


@dataclass(frozen=True, kw_only=True)
class Table:
    """Everything that can be chosen from, frozen; `layouts` and `kernels` are by device name."""

    provided_devices: tuple[Provided[Device], ...]
    layouts: Mapping[str, tuple[Provided[Layout], ...]]
    kernels: Mapping[str, tuple[Provided[Kernel], ...]]
    disabled: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layouts", MappingProxyType(dict(self.layouts)))
        object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(provided.record for provided in self.provided_devices)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for equal tables, whatever process asks."""
        parts = [repr(provided) for provided in self.provided_devices]
        for device, layouts in sorted(self.layouts.items()):
            parts += [f"{device} {_stable(entry.record)} {entry.origin}" for entry in layouts]
        for device, kernels in sorted(self.kernels.items()):
            parts += [f"{device} {_stable(entry.record)} {entry.origin}" for entry in kernels]
        parts += sorted(self.disabled)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def layout(self, device: Device, role: str) -> Provided[Layout]:
        """The default layout of a role on a device: the first answer, core's plain one the last."""
        for provided in self.layouts[device.name]:
            if provided.record.role == role:
                return provided
        raise SelectionError(
            f"no layout for role {role!r} on {device.name}: see Layout for the roles"
        )

    def offered(self, device: Device) -> dict[str, Layout]:
        """Every layout of a device by its name: what a kernel may ask for."""
        return {entry.record.name: entry.record for entry in self.layouts.get(device.name, ())}


def _stable(record: Layout | Kernel) -> str:
    """A record's text without addresses: `supports` is code, which the origin's version covers."""
    shown = {
        name: getattr(record, name) for name in record.__dataclass_fields__ if name != "supports"
    }
    if "dtypes" in shown:
        shown["dtypes"] = sorted(shown["dtypes"])
    return repr(shown)


def build_table(
    *,
    devices: Iterable[Provided[Device]],
    layouts: Mapping[str, Iterable[Provided[Layout]]],
    kernels: Mapping[str, Iterable[Provided[Kernel]]],
) -> Table:
    """The table of these records, less what `POLYSILICON_DISABLE_KERNELS` names."""
    table = Table(
        provided_devices=tuple(devices),
        layouts={device: tuple(entries) for device, entries in layouts.items()},
        kernels={device: tuple(entries) for device, entries in kernels.items()},
        disabled=frozenset(
            filter(None, os.environ.get("POLYSILICON_DISABLE_KERNELS", "").split(","))
        ),
    )
    names = {entry.record.name: entry for entries in table.kernels.values() for entry in entries}
    for name in sorted(table.disabled - set(names)):
        close = (
            ", ".join(difflib.get_close_matches(name, names)) or "`polysilicon kernels` lists them"
        )
        notice(
            f"POLYSILICON_DISABLE_KERNELS names {name!r}, and there is no such kernel. "
            f"Close: {close}",
            SelectionError,
        )
    for name, entry in names.items():
        if entry.record.op not in ops.NAMES:
            close = ", ".join(difflib.get_close_matches(entry.record.op, ops.NAMES))
            meant = f" (did you mean {close}?)" if close else ""
            notice(
                f"kernel {name} of {entry.origin} is for op {entry.record.op!r}, which this core "
                f"does not have{meant}; it is not used. `polysilicon kernels` lists the ops",
                SelectionError,
            )
    return table


@functools.cache
def current_table() -> Table:
    """The table of this process. `current_table.cache_clear()` builds it anew."""
    from polysilicon.plugins import checked

    found = checked()
    return build_table(devices=found.devices, layouts=found.layouts, kernels=found.kernels)


# --- choosing ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The kernel of one cut, imported."""

    provided: Provided[Kernel]
    reason: str
    function: Callable[..., Any]

    @property
    def kernel(self) -> Kernel:
        return self.provided.record


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One kernel of the op: the token ranges for which it was `chosen`, and why or why not."""

    provided: Provided[Kernel]
    chosen: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What serves a problem on a device: call `fn`, it has the op's signature.

    `cuts` holds (highest token count, choice), rising; most problems have one cut. `layouts` says
    which arguments `fn` takes packed, as `pack(layout, tensor)` makes them; it is the same for
    every cut, as an argument can only lie in one layout.
    """

    problem: Problem
    device: Device
    cuts: tuple[tuple[int, Choice], ...]
    candidates: tuple[Candidate, ...]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    fn: Callable[..., Any] = field(repr=False)

    @property
    def dtypes(self) -> frozenset[str]:
        """Activation dtypes that every cut takes; empty means any, as in `Kernel.dtypes`."""
        named = [c.kernel.dtypes for _, c in self.cuts if c.kernel.dtypes]
        return frozenset.intersection(*named) if named else frozenset()


def outcome(state: Round) -> tuple[Candidate, ...]:
    """All candidates with their reasons, the chosen ones first."""
    found = []
    for entry in state.entries:
        name = entry.record.name
        spans = tuple(_merged(state.chosen.get(name, [])))
        reason = state.against.get(name) or state.apart.get(name)
        if reason is None:
            reason = state.why[name] if spans else "fits; another is more specific or ranks higher"
        found.append(Candidate(provided=entry, chosen=spans, reason=reason))
    return tuple(sorted(found, key=lambda c: (not c.chosen, c.chosen[:1], c.provided.record.name)))


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in spans:
        if merged and merged[-1][1] + 1 == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return merged


def bind(
    problem: Problem,
    *,
    device: Device | str | None = None,
    table: Table | None = None,
    kernel: str | None = None,
    judge: Judge | None = None,
    plain: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
) -> Binding:
    """Chooses the kernel, or the kernels by token count, for a problem, and imports them.

    Args:
        problem: what is asked for.
        device: a record or a name; None means the current device.
        table: where to choose from; None means this process's table.
        kernel: ask for this kernel by name: it serves, or it fails; nothing falls back.
        judge: asked about each kernel that would be chosen; a text refuses it (the proof).
        plain: argument → why it can't be packed; kernels that take it packed are refused so.
        refused: layout → what it does wrong; kernels that take an argument in it are refused so.

    Raises:
        ValueError: the problem states a fact that its op does not have.
        SelectionError: nothing fits, two kernels tie, or the kernel asked for can't serve.
    """
    from polysilicon.devices import resolve

    found = resolve(device, table)
    table = table or current_table()
    state = candidates(problem, found, table, kernel, plain, refused)
    _check_asked(kernel, state)
    cuts = settle(state, judge, kernel)
    missing = [tokens for tokens, entry in cuts if entry is None]
    if missing:
        from polysilicon.explaining import nothing_fits

        raise SelectionError(nothing_fits(problem, found, outcome(state), missing))
    choices = tuple(
        (
            tokens[1],
            Choice(
                provided=entry,
                reason=state.why[entry.record.name],
                function=state.functions[entry.record.name],
            ),
        )
        for tokens, entry in cuts
        if entry is not None
    )
    return Binding(
        problem=problem,
        device=found,
        cuts=choices,
        candidates=outcome(state),
        layouts=_layouts(choices[0][1].kernel, table, found),
        fn=callable_for(
            ops.get(problem.op), [(highest, c.kernel, c.function) for highest, c in choices]
        ),
    )


def _layouts(kernel: Kernel, table: Table, device: Device) -> dict[str, Layout]:
    offered = table.offered(device) if kernel.layouts else {}
    return {argument: offered[name] for argument, name in kernel.layouts.items()}


def _check_asked(kernel: str | None, state: Round) -> None:
    if kernel is None:
        return
    names = [entry.record.name for entry in state.entries]
    if kernel not in names:
        raise SelectionError(
            f"there is no kernel {kernel!r} for {state.problem.op}: there are "
            f"{', '.join(names) or 'none'}"
        )
    if kernel in state.against:
        raise SelectionError(
            f"kernel {kernel} can't serve {state.problem.op}: {state.against[kernel]}"
        )
