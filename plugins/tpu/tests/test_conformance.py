"""The conformance suite of the core that is installed, with kernels in Pallas's interpreter."""

from __future__ import annotations

from typing import ClassVar

from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite


class Tpu(DeviceUnderTest):
    plugin = "tpu"
    device = "tpu:v6e"
    run_on = "cpu"
    environment: ClassVar = {"POLYSILICON_TPU_INTERPRET": "fast"}


class TestPlugin(Tpu, PluginSuite): ...


class TestLayouts(Tpu, LayoutSuite): ...


class TestOps(Tpu, OpSuite): ...


class TestLayers(Tpu, LayerSuite): ...
