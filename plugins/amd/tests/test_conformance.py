"""The conformance suite of the core that is installed, through Triton's interpreter."""

from __future__ import annotations

from polysilicon.api import Problem
from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite

# 40 steps and one tile of outputs: the only sample whose sum is split.
_SPLIT = {"in": 5120, "out": 48, "bias": True}


class AMD(DeviceUnderTest):
    plugin = "amd"
    device = "amd:gfx942"
    run_on = "cpu"
    problems = (Problem(op="linear", dtype="bfloat16", tokens=(1, 7), facts=_SPLIT),)


class TestPlugin(AMD, PluginSuite): ...


class TestLayouts(AMD, LayoutSuite): ...


class TestOps(AMD, OpSuite): ...


class TestLayers(AMD, LayerSuite): ...
