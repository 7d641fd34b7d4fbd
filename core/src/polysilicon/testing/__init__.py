"""The conformance suite: what every plugin is held to, of the core that is installed.

A vendor subclasses the suites in about ten lines (docs/conformance.md) and runs pytest. The checks
themselves need no pytest: `polysilicon check` runs them too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polysilicon.testing.subject import DeviceUnderTest

if TYPE_CHECKING:
    from polysilicon.testing.layer_suite import LayerSuite
    from polysilicon.testing.layout_suite import LayoutSuite
    from polysilicon.testing.op_suite import OpSuite
    from polysilicon.testing.plugin_suite import PluginSuite

__all__ = ["DeviceUnderTest", "LayerSuite", "LayoutSuite", "OpSuite", "PluginSuite"]

#: The suites import pytest (extra `testing`), and all but PluginSuite import torch.
_HOME = {
    "LayerSuite": "polysilicon.testing.layer_suite",
    "LayoutSuite": "polysilicon.testing.layout_suite",
    "OpSuite": "polysilicon.testing.op_suite",
    "PluginSuite": "polysilicon.testing.plugin_suite",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'polysilicon.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
