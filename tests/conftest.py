"""The cross-package tests: core and all plugins in one environment (`nox -s together`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# On the real device only, and only by `nox -s hardware`.
collect_ignore = [] if "POLYSILICON_HARDWARE" in os.environ else ["hardware"]


def _forget() -> None:
    # `polysilicon.plugins` is the function of that name: its module is reached this way only.
    from polysilicon.plugins import _absent, answers
    from polysilicon.selection import current_table

    _absent.clear()
    answers.cache_clear()
    current_table.cache_clear()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Turns plugins off, as in a new process with POLYSILICON_DISABLE_PLUGINS."""

    def turn_off(*names: str) -> None:
        monkeypatch.setenv("POLYSILICON_DISABLE_PLUGINS", ",".join(names))
        _forget()

    yield turn_off
    _forget()
