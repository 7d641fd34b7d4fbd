"""Fixtures of the tests of plugins and selection: fake installed distributions, fresh caches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polysilicon import discovery, notices, selection
from polysilicon.plugins import _absent, answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLUGINS = Path(__file__).parent / "data" / "plugins"


def _forget() -> None:
    from polysilicon.devices import _activated, forget

    _absent.clear()
    answers.cache_clear()
    selection.current_table.cache_clear()
    notices._told.clear()
    _activated.clear()
    forget()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has asked no plugin yet, with its own cache folder and no settings."""
    for name in ("PLUGINS", "DISABLE_PLUGINS", "DISABLE_KERNELS", "DEVICE", "PROOF", "STRICT"):
        monkeypatch.delenv(f"POLYSILICON_{name}", raising=False)
    monkeypatch.setenv("POLYSILICON_CACHE_DIR", str(tmp_path / "cache"))
    known = set(sys.modules)
    _forget()
    yield
    _forget()
    for name in set(sys.modules) - known:
        if name.startswith("acme_"):
            del sys.modules[name]


@pytest.fixture
def install(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts fake distributions of data/plugins on the path, as if pip had installed them."""

    def add(*names: str) -> None:
        for name in names:
            assert (PLUGINS / name).is_dir(), name
            monkeypatch.syspath_prepend(str(PLUGINS / name))
        assert discovery.core_version(), "the tests need an installed core"

    return add
