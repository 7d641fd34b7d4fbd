"""PluginSuite: what a plugin says of itself, without hardware and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polysilicon.testing.plugin_checks import check_plugin
from polysilicon.testing.suite import Suite

if TYPE_CHECKING:
    from polysilicon.testing.findings import Finding
    from polysilicon.testing.subject import Subject


@dataclass(frozen=True, kw_only=True)
class PluginCase:
    """The plugin as a whole."""

    id: str


class PluginSuite(Suite):
    """The plugin's records, import, detection and requirements. Runs on every machine."""

    @classmethod
    def why_not(cls, found: Subject) -> str:
        return ""

    @classmethod
    def cases(cls, found: Subject) -> list[PluginCase]:
        return [PluginCase(id=found.row.name)]

    @classmethod
    def look(cls, found: Subject, case: PluginCase) -> tuple[Finding, ...]:
        return check_plugin(cls, found)

    @classmethod
    def own_names(cls, found: Subject) -> set[str]:
        return {"plugin"}

    def test_plugin_module_imports_nothing_heavy(self, case: PluginCase) -> None:
        """`polysilicon plugins` must be instant: import toolchains inside functions."""
        self.settle(case, "light import")

    def test_detection_is_quick_and_does_not_raise(self, case: PluginCase) -> None:
        """Under 50 ms, with an empty answer where the chip is absent."""
        self.settle(case, "detection")

    def test_forced_device_has_a_record(self, case: PluginCase) -> None:
        """`POLYSILICON_DEVICE` works for each chip of the plugin, on every machine."""
        self.settle(case, "forced device")

    def test_hooks_give_the_same_records_again(self, case: PluginCase) -> None:
        """Records are data: no addresses, times or counters in them."""
        self.settle(case, "steady answers")

    def test_targets_exist(self, case: PluginCase) -> None:
        """Every `package.module:attribute`; read from source, as importing may need the chip."""
        self.settle(case, "targets")

    def test_kernels_are_for_devices_that_there_are(self, case: PluginCase) -> None:
        """`Kernel.device` is a kind, kind:arch or name of a device here, or of one that
        `POLYSILICON_DEVICE` can force. A kernel for another is never chosen."""
        self.settle(case, "devices")

    def test_kernels_are_for_ops_of_this_core(self, case: PluginCase) -> None:
        """`polysilicon kernels` lists the ops."""
        self.settle(case, "known ops")

    def test_layouts_that_kernels_take_are_offered(self, case: PluginCase) -> None:
        """`Kernel.layouts` names layouts that `polysilicon_layouts` offers on the device, for
        arguments that have a role (`Op.roles`); core never chooses such a kernel otherwise."""
        self.settle(case, "layouts")

    def test_supports_answers_problems_that_state_little(self, case: PluginCase) -> None:
        """A problem need not state every fact: `problem.fact(key, default)`."""
        self.settle(case, "supports")

    def test_requirement_on_core_has_floor_and_ceiling(self, case: PluginCase) -> None:
        """E.g. `polysilicon>=0.1,<0.3`: core reads it before it loads the plugin."""
        self.settle(case, "floor and ceiling")
