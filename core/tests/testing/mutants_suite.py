"""What a vendor would write for the plugin of mutants; run by test_mutants.py, not collected."""

from __future__ import annotations

from polysilicon.testing import DeviceUnderTest, LayerSuite, LayoutSuite, OpSuite, PluginSuite


class Mutants(DeviceUnderTest):
    plugin = "mutants"


class TestPlugin(Mutants, PluginSuite): ...


class TestLayouts(Mutants, LayoutSuite): ...


class TestOps(Mutants, OpSuite): ...


class TestLayers(Mutants, LayerSuite): ...


GAPS = {
    "attention.window_off_by_one": "known, all of it (#1)",
    "activation.fails_on_nothing[tokens 12]": "matches no sample of that name (#2)",
    "silu_and_mul.writes_input[values]": "its values are right, so this passes (#3)",
    "rms_norm.no_such_kernel": "nobody has this name (#4)",
}
INTERPRETER = {"ACME_INTERPRET": "1"}


class Known(DeviceUnderTest):
    plugin = "mutants"
    gaps = GAPS


class TestKnown(Known, OpSuite): ...


class Absent(DeviceUnderTest):
    plugin = "mutants"
    device = "mutants:m2"


class TestAbsent(Absent, OpSuite): ...


class Interpreted(Absent):
    run_on = "cpu"
    environment = INTERPRETER


class TestInterpreted(Interpreted, OpSuite): ...


class Elsewhere(DeviceUnderTest):
    plugin = "elsewhere"


class TestElsewhere(Elsewhere, OpSuite): ...


class Stray(DeviceUnderTest):
    plugin = "stray"


class TestStray(Stray, PluginSuite): ...


class TestWrongDevice(Stray, OpSuite): ...
