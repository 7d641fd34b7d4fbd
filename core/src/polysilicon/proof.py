"""Proof before use: a plugin's kernel is compared with the portable one before it is bound.

So are core's own that a compiler makes for the device (`Kernel.device` is `*:…`): what it makes of
them on this chip nobody may have seen.

Right answers first, on the op's samples and on the problem's own shapes; then speed against the
portable kernel. Wrong or slower means not used, with the measured number as the reason.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from polysilicon import ops, selection
from polysilicon.calling import load_kernel, load_target, takes_packed
from polysilicon.discovery import CORE, core_version
from polysilicon.errors import PolysiliconError, SelectionError
from polysilicon.notices import notice
from polysilicon.ops.contract import Sample
from polysilicon.ops.verify import copied, mismatch
from polysilicon.packed import packed_arguments, physical_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from polysilicon.ops.contract import Op
    from polysilicon.records import Device, Kernel, Layout, Problem, Provided
    from polysilicon.selection import Table

    Call = Callable[..., Any]

#: Token counts where single-bucket bugs were found in the field: one, odd, and one register tile.
SMALL = (1, 3, 4)
#: The large case of a bucket, where the bucket is higher than that.
LARGE = 512
#: Slower by more than this is beyond the noise of this way of timing.
NOISE = 1.1
ROUNDS = 11
#: Calls are repeated until a round takes about this long, far above the clock's own cost.
ROUND_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found out about one kernel on one problem and token range."""

    kernel: str
    state: Literal["right", "wrong", "slower"]
    reason: str = ""
    ratio: float | None = None  # its time ÷ the portable kernel's, None where not timed


class Proof:
    """Judges plugin kernels for one device, and remembers, here and in the cache folder."""

    def __init__(self, device: Device, table: Table) -> None:
        self._device = device
        self._table = table
        self._off = off()
        self._file = cache_folder() / "proof-1.json"
        self._known = _read(self._file)
        self._asked: dict[str, Verdict] = {}

    def told(self) -> list[str]:
        """Every verdict of this run as text, for the fingerprint: states, not times."""
        return sorted(
            f"{key} {verdict.kernel} {verdict.state}" for key, verdict in self._asked.items()
        )

    def judge(
        self, provided: Provided[Kernel], problem: Problem, tokens: tuple[int, int]
    ) -> str | None:
        """The reason not to use a kernel for these tokens; None where it may serve."""
        if _trusted(provided) or self._off:
            return None
        key = self._key(provided, problem, tokens)
        if key not in self._asked:
            self._asked[key] = self._agreed(key, provided, problem, tokens)
        verdict = self._asked[key]
        return verdict.reason if verdict.state != "right" else None

    def _key(self, provided: Provided[Kernel], problem: Problem, tokens: tuple[int, int]) -> str:
        kernel = provided.record
        parts = (
            f"{self._device!r}",
            f"{self._device.facts.get('driver')} {torch.__version__} {_triton()} {core_version()}",
            f"{provided.origin} {kernel.name} {kernel.target} {problem.key} {tokens}",
            _source(load_target(kernel.target)),
            *(
                f"{name} {layout.name} {layout.facts} {_source(load_target(str(layout.pack)))}"
                for name, layout in self._layouts(kernel).items()
            ),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]

    def _agreed(
        self, key: str, provided: Provided[Kernel], problem: Problem, tokens: tuple[int, int]
    ) -> Verdict:
        """Rank 0 decides for all: ranks that bind different kernels would run different graphs."""
        group = torch.distributed
        many = group.is_available() and group.is_initialized() and group.get_world_size() > 1
        if many and group.get_rank() != 0:
            box: list[Verdict | None] = [None]
            group.broadcast_object_list(box, src=0)
            assert box[0] is not None
            return box[0]
        verdict = self._known.get(key) or self._prove(provided.record, problem, tokens)
        if key not in self._known:
            self._known[key] = verdict
            _write(self._file, self._known)
        if many:
            group.broadcast_object_list([verdict], src=0)
        return verdict

    def _layouts(self, kernel: Kernel) -> dict[str, Layout]:
        offered = self._table.offered(self._device) if kernel.layouts else {}
        return {argument: offered[name] for argument, name in kernel.layouts.items()}

    def _prove(self, kernel: Kernel, problem: Problem, tokens: tuple[int, int]) -> Verdict:
        op = ops.get(problem.op)
        layouts, portable = self._layouts(kernel), functools.partial(self._portable, problem)
        candidate = _packing(op, kernel, layouts)
        # Timed without the op around it: a compiled or captured graph doesn't pay for that.
        bare = load_target(kernel.target)
        dtype = getattr(torch, problem.dtype)
        target = torch.device(self._device.torch_device)
        with torch.inference_mode():
            cases = itertools.chain(
                _samples(op, kernel, tokens, dtype, target),
                _model_shapes(op, portable, problem, tokens, dtype, target),
            )
            for judged_by, sample in cases:
                found = _wrong(judged_by, candidate, sample, dtype)
                if found is not None:
                    reason = f"refused by proof, wrong on {sample.name!r}: {found}"
                    return Verdict(kernel=kernel.name, state="wrong", reason=reason)
            if op.inputs is None or not self._speed_counts():
                return Verdict(kernel=kernel.name, state="right")
            ratio = None
            # The ends of the bucket: a kernel may be fast on many tokens and slow on one.
            for count in sorted({tokens[0], min(tokens[1], max(tokens[0], LARGE))}):
                usual = portable(count)
                if usual is None:
                    break
                # The same memory for both; what one writes, the other writes too. What is packed
                # is packed once, as prepare() does.
                given = copied(op.inputs(problem, count, dtype, target))
                packed = physical_arguments(packed_arguments(layouts, given))
                ours, theirs = (
                    functools.partial(bare, **packed),
                    functools.partial(usual, **given),
                )
                slower, ratio = _slower(ours, theirs, self._device)
                if slower:
                    reason = (
                        f"demoted by proof: {ratio:.2f}× the time of the portable kernel "
                        f"at {count} tokens"
                    )
                    return Verdict(kernel=kernel.name, state="slower", reason=reason, ratio=ratio)
        return Verdict(kernel=kernel.name, state="right", ratio=ratio)

    def _speed_counts(self) -> bool:
        # A simulator's clock says nothing about the chip, and neither does a forced device's.
        return self._device.present and not self._device.simulated

    def _portable(self, problem: Problem, tokens: int) -> Call | None:
        """Core's own choice for that many tokens among what serves unproven."""
        offered = self._table.kernels[self._device.name]
        core = tuple(entry for entry in offered if _trusted(entry))
        table = replace(self._table, kernels={**self._table.kernels, self._device.name: core})
        try:
            asked = replace(problem, tokens=(tokens, tokens))
            binding = selection.bind(asked, device=self._device, table=table)
        except SelectionError:  # a device that only the plugin serves: there is nothing to compare
            return None
        return load_target(binding.cuts[0][1].kernel.target)


def off() -> bool:
    """Whether `POLYSILICON_PROOF=off` skips the proof."""
    value = os.environ.get("POLYSILICON_PROOF", "on")
    if value not in ("on", "off"):
        raise ValueError(f"POLYSILICON_PROOF is {value!r}: expected 'on' or 'off'")
    return value == "off"


def _trusted(provided: Provided[Kernel]) -> bool:
    """Whether a kernel serves unproven: those of core that are plain PyTorch or its libraries."""
    return provided.origin.plugin == CORE and not provided.record.device.startswith("*:")


def _samples(
    op: Op, kernel: Kernel, tokens: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Op, Sample]]:
    """The op's own samples within the kernel's claim, judged by the reference.

    A kernel that narrows its claim by `supports` is not held to samples of other shapes, as long
    as the op can make the shapes that are asked of it.
    """
    if kernel.supports is not None and op.inputs is not None:
        return
    low, high = kernel.tokens or (0, tokens[1])
    for sample in op.samples(dtype, device):
        if low <= op.tokens(next(iter(sample.kwargs.values()))) <= high:
            yield op, sample


def _model_shapes(
    op: Op,
    portable: Callable[[int], Call | None],
    problem: Problem,
    tokens: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[Op, Sample]]:
    """Calls of the problem's own shapes, judged by the portable kernel.

    Not by the reference: in float64, and partly in Python, it would take minutes there.
    """
    if op.inputs is None:
        return
    low, high = tokens
    large = min(high, max(low, LARGE))
    for count in sorted({n for n in (low, *SMALL, large) if low <= n <= high}):
        usual = portable(count)
        if usual is not None:
            kwargs = op.inputs(problem, count, dtype, device)
            sample = Sample(name=f"{count} tokens of the model's shape", kwargs=kwargs)
            yield replace(op, reference=usual), sample


def _packing(op: Op, kernel: Kernel, layouts: Mapping[str, Layout]) -> Call:
    """A kernel as it is bound, with plain arguments: what it takes packed is packed here."""
    bound = takes_packed(op, kernel.name, kernel.layouts, load_kernel(kernel))
    if not layouts:
        return bound
    return lambda **arguments: bound(**packed_arguments(layouts, arguments))


def _wrong(op: Op, candidate: Call, sample: Sample, dtype: torch.dtype) -> str | None:
    try:
        return mismatch(op, candidate, sample, dtype)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"


def _slower(candidate: Call, portable: Call, device: Device) -> tuple[bool, float]:
    """Whether the candidate is slower beyond noise, and its time ÷ the portable kernel's.

    Whatever else runs on the machine only ever adds time, so the fastest of interleaved rounds
    are compared; and on a machine so busy that the portable kernel's usual round is slower than
    the candidate's fastest, nothing is held against the candidate.
    """
    candidate()  # compiles, and fills caches
    portable()
    once = max(_time(call, device, 1) for call in (candidate, portable))
    calls = max(1, int(ROUND_SECONDS / once))
    rounds = []
    for turn in range(ROUNDS):
        order = (candidate, portable) if turn % 2 else (portable, candidate)
        took = {call: _time(call, device, calls) for call in order}
        rounds.append((took[candidate], took[portable]))
    fastest = min(our for our, _ in rounds)
    ratio = fastest / min(their for _, their in rounds)
    return ratio > NOISE and fastest > statistics.median(their for _, their in rounds), ratio


def _time(call: Call, device: Device, calls: int) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return time.perf_counter() - begin


def _source(function: Call) -> str:
    """A hash of the file that holds a kernel: one under development is proven after each edit."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # built in, or made by a compiler: its distribution's version stands for it
        file = None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _synchronize(device: Device) -> None:
    if device.torch_device != "cpu":
        torch.accelerator.synchronize(torch.device(device.torch_device))


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


# --- the cache ---------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`POLYSILICON_CACHE_DIR`, or polysilicon's folder in the user's cache folder."""
    if named := os.environ.get("POLYSILICON_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polysilicon"


def _read(file: Path) -> dict[str, Verdict]:
    try:
        return {key: Verdict(**row) for key, row in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        notice(
            f"the verdict cache {file} cannot be read ({error}); it is built anew", PolysiliconError
        )
        return {}


def _write(file: Path, verdicts: dict[str, Verdict]) -> None:
    """Replaces the file in one step, with what other processes wrote meanwhile kept."""
    merged = {**_read(file), **verdicts}
    text = json.dumps({key: asdict(verdict) for key, verdict in sorted(merged.items())}, indent=1)
    scratch = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as out:
            out.write(text)
        Path(scratch).replace(file)
    except OSError as error:
        notice(f"verdicts are not kept: cannot write {file} ({error})", PolysiliconError)
        if scratch:
            with contextlib.suppress(OSError):
                Path(scratch).unlink()
