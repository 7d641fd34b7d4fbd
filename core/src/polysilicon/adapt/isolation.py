"""Runs one function over many items in processes of its own, so that a crash costs one item."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import redirect_stdout
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

Result = TypeVar("Result")

#: New interpreters: a fork could inherit a lock that a thread of torch's holds.
_SPAWN = multiprocessing.get_context("spawn")

#: Seconds in which a process must have imported the function, on a busy machine too.
_START = 300.0

#: What a process sends once it can work: the item's time runs from there.
_READY = "ready"


def each(
    function: Callable[..., Result],
    items: Sequence[str],
    *,
    arguments: tuple[Any, ...] = (),
    jobs: int | None = None,
    timeout: float,
    lost: Callable[[str, str], Result],
) -> Iterator[Result]:
    """Yields `function(item, *arguments)` for every item, in the order in which they finish.

    Args:
        function: importable by name, as its processes are not copies of this one.
        items: what to call it with.
        arguments: further arguments, the same for all.
        jobs: number of processes; one a core by default.
        timeout: seconds that one item may take before its process is ended.
        lost: result for an item whose process died or was ended, from the item and the reason.
    """
    waiting = list(reversed(items))
    count = min(jobs or len(os.sched_getaffinity(0)), len(waiting))
    workers = [_Worker(function, arguments, waiting.pop()) for _ in range(count)]
    try:
        while workers:
            wait([worker.connection for worker in workers], timeout=0.2)
            for worker in list(workers):
                answer = worker.answer(timeout, lost)
                if answer is None:
                    continue
                yield answer[0]
                if not waiting:
                    workers.remove(worker)
                    worker.end()
                elif worker.alive:
                    worker.start(waiting.pop())
                else:
                    place = workers.index(worker)
                    workers[place] = _Worker(function, arguments, waiting.pop())
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """One process and the item that it works on."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], item: str) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_work, args=(theirs, function, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.alive, self.ready = True, False
        self.start(item)

    def start(self, item: str) -> None:
        """Hands the process its next item."""
        self.item, self.started = item, time.monotonic()
        self.connection.send(item)

    def answer(self, timeout: float, lost: Callable[[str, str], Result]) -> tuple[Result] | None:
        """The result of the current item once there is one, in a tuple; None while it runs."""
        try:
            if self.connection.poll():
                result: Any = self.connection.recv()
                if self.ready:
                    return (result,)
                self.ready, self.started = True, time.monotonic()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            self.end()
            return (lost(self.item, f"its process died with exit code {code}"),)
        limit = timeout if self.ready else _START
        if time.monotonic() - self.started > limit:
            self.end()
            return (lost(self.item, f"no result within {limit:g} s"),)
        return None

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.alive = False
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    # One process a core: threads of several processes on the same cores only wait for each other.
    torch.set_num_threads(1)
    # Standard output is the caller's; foreign code must not print into it.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        connection.send(_READY)
        while True:
            try:
                item = connection.recv()
            except EOFError:
                return
            connection.send(function(item, *arguments))
