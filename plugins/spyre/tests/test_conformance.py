"""The conformance suite of the core that is installed, on the simulator."""

from __future__ import annotations

from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite


class Simulator(DeviceUnderTest):
    plugin = "spyre"
    device = "spyre:sim"


class TestPlugin(Simulator, PluginSuite): ...


class TestLayouts(Simulator, LayoutSuite): ...


class TestOps(Simulator, OpSuite): ...


class TestLayers(Simulator, LayerSuite): ...
