"""What native code writes to standard error: compilers report there and then carry on."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Captures what file descriptor 2 of the whole process gets; the list has it afterwards.

    `sys.stderr` alone would miss what native libraries write. Other threads' words count too.
    Where descriptor 2 is a file that can be read, as in the process that `polysilicon compile`
    starts, the words stay in it: a compiler may end the process, and then only they tell why.
    """
    texts: list[str] = []
    sys.stderr.flush()
    if _is_readable_file(2):
        start = os.fstat(2).st_size
        try:
            yield texts
        finally:
            sys.stderr.flush()
            texts.append(_since(start))
        return
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            sys.stderr.flush()
            texts.append(_since(0))
            os.dup2(kept, 2)
            os.close(kept)


def _since(start: int) -> str:
    return os.pread(2, os.fstat(2).st_size - start, start).decode(errors="replace")


def _is_readable_file(descriptor: int) -> bool:
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    return stat.S_ISREG(os.fstat(descriptor).st_mode) and mode == os.O_RDWR
