"""The conformance suite of the core that is installed, on the simulated chip."""

from __future__ import annotations

from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite


class Acme(DeviceUnderTest):
    plugin = "acme"
    device = "acme:sim"


class TestPlugin(Acme, PluginSuite): ...


class TestLayouts(Acme, LayoutSuite): ...


class TestOps(Acme, OpSuite): ...


class TestLayers(Acme, LayerSuite): ...
