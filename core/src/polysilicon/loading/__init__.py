"""Loads models from folders, GGUF files and installed model packages.

Importing this package imports neither torch nor Transformers; its names do when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polysilicon.loading.loader import DTYPES, Loaded, load
    from polysilicon.loading.packages import KNOWN
    from polysilicon.loading.shapes import LayerShape, model_shapes

__all__ = ["DTYPES", "KNOWN", "LayerShape", "Loaded", "load", "model_shapes"]

_HOME = {
    "DTYPES": "loader",
    "KNOWN": "packages",
    "LayerShape": "shapes",
    "Loaded": "loader",
    "load": "loader",
    "model_shapes": "shapes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
