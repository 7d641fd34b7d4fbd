"""The process that compiles: `python -m polysilicon.offline.worker DEVICE PIPE KERNEL…`.

Each line that it writes to the pipe is one JSON list, its first item the kind of news:
`["start", kernel]`, `["compiled", fields of Compiled]`, `["error", text]`, `["end"]`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from typing import IO, TYPE_CHECKING, Any

from polysilicon.calling import load_target
from polysilicon.devices import find
from polysilicon.records import Compiled
from polysilicon.selection import current_table

if TYPE_CHECKING:
    from polysilicon.records import Device, Kernel


def main(device_name: str, pipe: str, *names: str) -> None:
    """Compiles the kernels of these names one after the other."""
    device = find(device_name)
    kernels = {entry.record.name: entry.record for entry in current_table().kernels[device.name]}
    with os.fdopen(int(pipe), "w") as news:
        for name in names:
            _forget_output()
            _tell(news, "start", name)
            try:
                _compile(kernels[name], device, news)
            except ModuleNotFoundError as error:
                _tell(
                    news,
                    "error",
                    f"compiling it needs {error.name}, which is not installed: pip install "
                    f"{error.name}, or the extra of the plugin that brings it (its README)",
                )
            except Exception as error:
                text = f"{kernels[name].offline} raised {type(error).__name__}: {error}"
                _tell(news, "error", text)
            _tell(news, "end")


def _forget_output() -> None:
    """Empties the file behind standard error: a crash is explained by its own kernel's words."""
    sys.stderr.flush()
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)


def _compile(kernel: Kernel, device: Device, news: IO[str]) -> None:
    assert kernel.offline is not None
    for compiled in load_target(kernel.offline)(device):
        if not isinstance(compiled, Compiled) or compiled.kernel != kernel.name:
            raise TypeError(f"expected Compiled records of kernel {kernel.name}, got {compiled!r}")
        # Not asdict(): it copies deeply, which a read-only mapping refuses.
        told = {field.name: getattr(compiled, field.name) for field in fields(compiled)}
        _tell(news, "compiled", {**told, "facts": dict(compiled.facts)})


def _tell(news: IO[str], *what: Any) -> None:
    print(json.dumps(what), file=news, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
