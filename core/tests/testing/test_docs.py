"""The lines that docs/conformance.md gives vendors are code that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from polysilicon.testing.findings import gaps_of
from polysilicon.testing.suite import Suite

TEXT = (Path(__file__).parents[3] / "docs" / "conformance.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_ten_lines_make_four_suites() -> None:
    _, lines, _ = BLOCKS
    assert len([line for line in lines.splitlines() if line]) <= 10
    names: dict[str, Any] = {"__name__": "vendors_tests"}
    exec(lines, names)
    made = [names[f"Test{suite}"] for suite in ("Plugin", "Layouts", "Ops", "Layers")]
    assert all(issubclass(suite, Suite) and suite.plugin == "acme" for suite in made)


def test_the_gaps_shown_are_well_formed() -> None:
    names: dict[str, Any] = {}
    exec("from polysilicon.testing import DeviceUnderTest\n" + BLOCKS[2], names)
    assert [gap.name for gap in gaps_of(names["Acme"].gaps)][:2] == ["attention", "rms_norm.acme"]


def test_every_attribute_and_suite_is_documented() -> None:
    from polysilicon.testing import DeviceUnderTest, __all__

    assert all(f"| `{name}` |" in TEXT for name in DeviceUnderTest.__annotations__)
    assert all(name in TEXT for name in __all__)


def test_every_check_is_listed() -> None:
    from polysilicon.testing import layout_checks, op_checks, plugin_checks, tie_checks

    checks = [*plugin_checks.CHECKS, *layout_checks.CHECKS, *op_checks.CHECKS]
    checks += [op_checks.CLAIM, tie_checks.TIES, "eager", "compiled"]
    table = TEXT.partition("| suite | checks |")[2]
    assert [check for check in checks if f"`{check}`" not in table] == []
