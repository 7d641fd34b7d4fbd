"""Compiling the kernels of a device in a process that may crash or hang without harm."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from polysilicon.records import Compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from polysilicon.records import Device

#: A variant that takes longer holds up its first user, and mostly means emulated arithmetic.
SLOW_SECONDS = 20.0
#: Nothing new for so long is a hang. Well above SLOW_SECONDS, as a busy machine is slower, and a
#: function that returns a list tells of all its variants at once.
PATIENCE_SECONDS = 180.0


def compile_kernels(
    device: Device,
    names: Sequence[str],
    *,
    patience: float = PATIENCE_SECONDS,
    on_start: Callable[[str], object] = lambda name: None,
) -> Iterator[Compiled]:
    """Runs the `Kernel.offline` of each kernel, and yields what it made, problems included.

    A kernel whose compiler crashes or hangs costs only itself: the next ones go on in a new
    process.

    Args:
        device: for which; it need not be on this machine.
        names: of kernels that have an `offline`.
        patience: seconds without news after which the process is killed.
        on_start: told the name of each kernel when its turn comes.
    """
    left = list(names)
    while left:
        with _Worker(device.name, left, patience) as worker:
            yield from _follow(worker, left, on_start)


@dataclass
class _Turn:
    """One kernel's turn in a worker."""

    kernel: str
    found: list[Compiled] = field(default_factory=list)


def _follow(
    worker: _Worker, left: list[str], on_start: Callable[[str], object]
) -> Iterator[Compiled]:
    """Takes each kernel that had its turn off `left`, the one at which the worker ended too."""
    turn = _Turn(left[0])
    for kind, *rest in worker.news():
        if kind == "start":
            turn = _Turn(rest[0])
            on_start(turn.kernel)
        elif kind == "end":
            if not turn.found:
                yield _failed(turn, "compiled nothing: its offline function yielded no variant")
            left.remove(turn.kernel)
        else:
            made = _gated(turn, **rest[0]) if kind == "compiled" else _failed(turn, rest[0])
            turn.found.append(made)
            yield made
    if turn.kernel in left:
        left.remove(turn.kernel)
        yield _failed(turn, worker.epitaph())


def _gated(turn: _Turn, *, problems: Sequence[str], **fields: Any) -> Compiled:
    """The record as the plugin made it, with what core has against it."""
    made = Compiled(problems=tuple(problems), **fields)
    more = []
    if made.seconds > SLOW_SECONDS:
        text = f"took {made.seconds:.0f} s to compile, at most {SLOW_SECONDS:.0f} s is accepted"
        more.append(text)
    if any(made.variant == other.variant for other in turn.found):
        more.append("came twice: each variant of a kernel needs a name of its own")
    return replace(made, problems=(*made.problems, *more))


def _failed(turn: _Turn, problem: str) -> Compiled:
    after = f"after {turn.found[-1].variant}" if turn.found else ""
    return Compiled(kernel=turn.kernel, variant=after, seconds=0.0, problems=(problem,))


class _Worker:
    """The child process, in a group of its own with whatever compilers it starts."""

    def __init__(self, device: str, names: Sequence[str], patience: float) -> None:
        self.patience = patience
        self.hung = False
        self.said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed in __exit__
        self.read, write = os.pipe()
        command = [sys.executable, "-m", "polysilicon.offline.worker", device, str(write), *names]
        # It finds the packages that this process finds.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        try:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.said,
                pass_fds=(write,),
                start_new_session=True,
            )
        finally:
            os.close(write)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        os.close(self.read)
        self.said.close()

    def news(self) -> Iterator[list[Any]]:
        """What the child tells, until it ends or is killed for telling nothing."""
        pending = b""
        while True:
            if not select.select([self.read], [], [], self.patience)[0]:
                self.hung = True
                self._kill()
                return
            chunk = os.read(self.read, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (json.loads(line) for line in lines)

    def epitaph(self) -> str:
        """Why the child ended before its work was done."""
        if self.hung:
            return f"hangs: killed after {self.patience:.0f} s without a result"
        status = self.process.wait()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        self.said.seek(0)
        last = " / ".join(self.said.read().decode(errors="replace").strip().splitlines()[-3:])
        return f"the compiling process ended with {how}" + (f", saying: {last}" if last else "")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
