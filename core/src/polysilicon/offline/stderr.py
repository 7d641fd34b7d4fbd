"""What native code writes to standard error: compilers report there and then carry on."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Redirects file descriptor 2 of the whole process; the list has its text afterwards.

    `sys.stderr` alone would miss what native libraries write. Other threads are redirected too.
    """
    texts: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
