"""The conformance suite; on a GPU if there is one, else by Triton's interpreter."""

import os

from polysilicon.api import Problem
from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite

#: As conftest.py decided.
INTERPRETED = "TRITON_INTERPRET" in os.environ
#: One decode over 1000 tokens: long enough to be split along its keys.
SPLIT = {"heads": 4, "kv_heads": 1, "head_size": 64, "block_size": 16}


class Nvidia(DeviceUnderTest):
    plugin = "nvidia"
    device = "nvidia:h200" if INTERPRETED else None
    run_on = "cpu" if INTERPRETED else None
    problems = tuple(
        Problem(op="paged_attention", dtype="bfloat16", tokens=(1, 1), facts=SPLIT | rule)
        for rule in ({"sinks": True}, {"window": 400, "softcap": True}, {"causal": False})
    )


class TestPlugin(Nvidia, PluginSuite): ...


class TestLayouts(Nvidia, LayoutSuite): ...


class TestOps(Nvidia, OpSuite): ...


class TestLayers(Nvidia, LayerSuite): ...
