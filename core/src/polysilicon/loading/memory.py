"""Whether the weights of a model fit into this machine's free memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from polysilicon.errors import LoadError

#: Working memory of the load itself on top of the weights (slices, tables, skeleton).
_OVERHEAD = 1.1
_CGROUP = Path("/sys/fs/cgroup")


def require(weight_bytes: int, source: Path, dtype: str) -> None:
    """Raises LoadError when `weight_bytes` do not fit, before anything is allocated."""
    needed, free = int(weight_bytes * _OVERHEAD), available_bytes()
    if needed > free:
        raise LoadError(
            f"{source} needs {needed / 1e9:.2f} GB in {dtype} and {free / 1e9:.2f} GB are free: "
            "free memory, choose a smaller dtype (bfloat16) or a smaller model"
        )


def available_bytes() -> int:
    """Memory that can be allocated without swapping, container limits included."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    # Page cache counts as used in a control group, but is given back under pressure.
    return min(free, int(limit) - used + int(cached.get("inactive_file", 0)))
