"""Tells the user once, in words, what was not used and why."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from polysilicon.errors import PolysiliconWarning

if TYPE_CHECKING:
    from polysilicon.errors import PolysiliconError

_told: set[str] = set()


def notice(message: str, error: type[PolysiliconError]) -> None:
    """Warns once per process; under `POLYSILICON_STRICT=1` raises `error` instead."""
    if strict():
        raise error(message)
    if message in _told:
        return
    _told.add(message)
    warnings.warn(message, PolysiliconWarning, stacklevel=3)


def strict() -> bool:
    """Whether `POLYSILICON_STRICT=1` turns warnings into errors."""
    value = os.environ.get("POLYSILICON_STRICT", "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"POLYSILICON_STRICT is {value!r}: expected '1' or '0'")
    return value == "1"
