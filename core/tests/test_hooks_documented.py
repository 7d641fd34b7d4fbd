"""Every hook is documented with its exact signature, has an example that runs, and has a test."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, script

from polysilicon import hookspecs
from polysilicon.records import Device, Kernel, Layout

GENERATOR = script("generate_hooks")
HOOKS: list[str] = list(GENERATOR.hooks())


def test_page_is_current() -> None:
    assert GENERATOR.PAGE.read_text() == GENERATOR.render(), "run python docs/generate_hooks.py"


@pytest.mark.parametrize("name", HOOKS)
def test_hook_stands_in_the_page_with_its_signature(name: str) -> None:
    arguments = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    assert f"## `{name}({arguments})`" in (ROOT / "docs" / "hooks.md").read_text()


@pytest.mark.parametrize("name", HOOKS)
def test_docstring_has_all_that_an_author_asks(name: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, name)) or ""
    assert text.splitlines()[0].endswith("?")
    for part in ("When: ", "Returns:", "Example:", "@hookimpl", "Added in version "):
        assert part in text
    for argument in inspect.signature(getattr(hookspecs, name)).parameters:
        assert f"    {argument}: " in text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("polysilicon_devices", ()),
        ("polysilicon_layouts", (Device(name="acme:z", kind="acme"),)),
        ("polysilicon_kernels", (Device(name="acme:z", kind="acme"),)),
    ],
)
def test_example_runs(name: str, arguments: tuple[Device, ...]) -> None:
    text = inspect.getdoc(getattr(hookspecs, name)) or ""
    lines = text.split("```python\n")[1].split("```")[0].splitlines()
    code = inspect.cleandoc("\n".join(["", *lines]))
    scope: dict[str, Any] = {"hookimpl": lambda function: function, "read_chip_name": lambda: "z"}
    scope |= {"Device": Device, "Layout": Layout, "Kernel": Kernel}
    exec(code, scope)
    assert list(scope[name](*arguments))


@pytest.mark.parametrize("name", HOOKS)
def test_hook_has_a_test(name: str) -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert f"def test_hook_{name}" in tests
