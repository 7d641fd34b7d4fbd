"""All plugins have one shape, file for file, and keep to themselves."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from releasing.checks import MARKER
from releasing.distributions import Project, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
#: Every plugin has these; further modules and tests are its own business.
FILES = (
    *("README.md", "CHANGELOG.md"),
    *("src/{package}/__init__.py", "src/{package}/py.typed", "src/{package}/plugin.py"),
    *("src/{package}/device.py", "src/{package}/chips.py", "src/{package}/layout.py"),
    *("src/{package}/_compat.py", "src/{package}/kernels/__init__.py"),
    *("tests/conftest.py", "tests/test_conformance.py", "tests/test_device.py"),
    "tests/test_layout.py",
)
#: What a plugin may import of core.
OPEN = ("polysilicon.api", "polysilicon.testing")
#: Modules that core imports to list and to explain: the standard library and their own only.
LIGHT = ("__init__.py", "plugin.py", "device.py", "chips.py", "_compat.py")
HEAVY = ("torch", "triton", "jax", "numpy", "helion", "transformers")

plugins = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)


def _data(plugin: Path) -> dict[str, Any]:
    return tomllib.loads((plugin / "pyproject.toml").read_text())


def _project(plugin: Path) -> Project:
    return parse((plugin / "pyproject.toml").read_text(), str(plugin))


def _imports(file: Path, *, top_only: bool = False) -> Iterator[str]:
    """Modules that a file imports; of `from a import b` both `a` and `a.b`."""
    tree = ast.parse(file.read_text())
    for node in _running_at_import(tree) if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _running_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: outside of functions and of TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        yield from _running_at_import(node)


def test_there_are_four_plugins() -> None:
    assert [plugin.name for plugin in PLUGINS] == ["amd", "nvidia", "spyre", "tpu"]


@plugins
def test_a_plugin_has_the_files_that_all_have(plugin: Path) -> None:
    wanted = [file.format(package=f"polysilicon_{plugin.name}") for file in FILES]
    assert [file for file in wanted if not (plugin / file).exists()] == []


@plugins
def test_a_plugin_has_a_kernel_and_a_test_of_it(plugin: Path) -> None:
    kernels = plugin / "src" / f"polysilicon_{plugin.name}" / "kernels"
    names = [file.stem for file in kernels.glob("[!_]*.py")]
    tests = [file.stem for file in (plugin / "tests").glob("test_*.py")]
    assert names
    assert [name for name in names if f"test_{name}" in tests]


@plugins
def test_the_project_says_the_same_things_everywhere(plugin: Path) -> None:
    data = _data(plugin)
    project = data["project"]
    assert project["name"] == f"polysilicon-{plugin.name}"
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert project["readme"] == "README.md"
    assert project["entry-points"]["polysilicon.plugins.v1"] == {
        plugin.name: f"polysilicon_{plugin.name}.plugin"
    }
    assert data["build-system"]["build-backend"] == "hatchling.build"
    assert "test" in project["optional-dependencies"]


@plugins
def test_the_requirement_on_core_has_a_floor_and_a_ceiling_and_takes_this_core(
    plugin: Path,
) -> None:
    core = parse((ROOT / "core" / "pyproject.toml").read_text(), "core").version
    assert _project(plugin).core_specifier.contains(core, prereleases=True)


@plugins
def test_the_changelog_has_a_place_for_the_next_release(plugin: Path) -> None:
    assert MARKER in (plugin / "CHANGELOG.md").read_text().splitlines()


@plugins
def test_a_plugin_imports_of_core_what_is_open_to_plugins(plugin: Path) -> None:
    closed = [
        f"{file.relative_to(plugin)}: {module}"
        for file in sorted(plugin.rglob("*.py"))
        for module in _imports(file)
        if module.partition(".")[0] == "polysilicon"
        and not module.startswith(OPEN)
        and module != "polysilicon"
    ]
    assert closed == []


@plugins
def test_a_plugin_imports_no_other_plugin(plugin: Path) -> None:
    others = {f"polysilicon_{other.name}" for other in PLUGINS if other != plugin}
    found = [
        f"{file.relative_to(plugin)}: {module}"
        for file in sorted(plugin.rglob("*.py"))
        for module in _imports(file)
        if module.partition(".")[0] in others
    ]
    assert found == []


@plugins
def test_light_modules_import_nothing_heavy(plugin: Path) -> None:
    package = plugin / "src" / f"polysilicon_{plugin.name}"
    found = [
        f"{name}: {module}"
        for name in LIGHT
        for module in _imports(package / name, top_only=True)
        if module.partition(".")[0] in HEAVY
    ]
    assert found == []
