"""One set of LLM inference layers that runs at native speed on every chip.

The public names are imported at first use, so importing the package imports no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polysilicon.adapt import adapt
    from polysilicon.devices import devices, use
    from polysilicon.engine import Engine
    from polysilicon.explaining import explain
    from polysilicon.loading import load
    from polysilicon.plugins import plugins
    from polysilicon.prepare import prepare

    __version__: str

__all__ = [
    "Engine",
    "__version__",
    "adapt",
    "devices",
    "explain",
    "load",
    "plugins",
    "prepare",
    "use",
]

_HOME = {
    "Engine": "polysilicon.engine",
    "adapt": "polysilicon.adapt",
    "devices": "polysilicon.devices",
    "explain": "polysilicon.explaining",
    "load": "polysilicon.loading",
    "plugins": "polysilicon.plugins",
    "prepare": "polysilicon.prepare",
    "use": "polysilicon.devices",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("polysilicon")
    elif name in _HOME:
        value = _public(name)
    else:
        raise AttributeError(f"module 'polysilicon' has no attribute {name!r}")
    globals()[name] = value
    return value


def _public(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        from polysilicon.errors import missing_extra

        told = missing_extra(error)
        if told is None:
            raise
        raise ModuleNotFoundError(f"polysilicon.{name}: {told}", name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps the public functions `plugins`, `prepare`, `devices` and `adapt` in their place.

    The import system binds every submodule as an attribute of its package, these names included.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
