"""Core's own plugin passes the suite that every plugin is held to, whole."""

from __future__ import annotations

from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite


class Core(DeviceUnderTest):
    plugin = "core"
    device = "cpu"


class TestPlugin(Core, PluginSuite): ...


class TestLayouts(Core, LayoutSuite): ...


class TestOps(Core, OpSuite): ...


class TestLayers(Core, LayerSuite): ...
