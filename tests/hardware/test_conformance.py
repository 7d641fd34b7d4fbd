"""The conformance suite on the real device of the plugin that POLYSILICON_HARDWARE names.

A plugin's own tests may run its kernels in an interpreter or a simulator, and skip what needs the
chip. Here the chip is there, or the tests fail.
"""

from __future__ import annotations

import os

from polysilicon.devices import devices
from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite


class Real(DeviceUnderTest):
    plugin = os.environ["POLYSILICON_HARDWARE"]


def test_the_device_is_here() -> None:
    real = [d.name for d in devices() if d.kind == Real.plugin and d.present and not d.simulated]
    assert real, f"no {Real.plugin} device on this machine"


class TestPlugin(Real, PluginSuite): ...


class TestLayouts(Real, LayoutSuite): ...


class TestOps(Real, OpSuite): ...


class TestLayers(Real, LayerSuite): ...
