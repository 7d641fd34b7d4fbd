"""Every state of a plugin that can't be used: wheels that uv installed in a fresh environment.

The distributions are installed without their dependencies: that is what upgrades in place and
broken environments leave behind, and what an installer would have refused.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from installing import make_wheel, run, uv

if TYPE_CHECKING:
    from collections.abc import Mapping

CORE = Path(__file__).parents[1]
VERSION = tomllib.loads((CORE / "pyproject.toml").read_text())["project"]["version"]
MINOR = ".".join(VERSION.split(".")[:2])

GOOD = """
from polysilicon.api import Device, hookimpl

@hookimpl
def polysilicon_devices():
    return [Device(name="good:x1", kind="good")]
"""

#: distribution → (version, what it requires, API major, plugin name, code)
DISTRIBUTIONS = {
    "acme-good": ("1.2", "polysilicon>=0.0.1,<90", 1, "good", GOOD),
    "acme-newer": ("0.9.0", "polysilicon>=99.1,<100", 1, "newer", "raise AssertionError"),
    "acme-older": ("0.2.0", "polysilicon<0.0.5", 1, "older", "raise AssertionError"),
    "acme-next": ("3.0", "polysilicon", 2, "next", "raise AssertionError"),
    "acme-broken": ("1.0", "polysilicon", 1, "broken", "import acme_toolchain"),
    "acme-twin-a": ("1.0", "polysilicon", 1, "twin", "raise AssertionError"),
    "acme-twin-b": ("1.1", "polysilicon", 1, "twin", "raise AssertionError"),
    "acme-off": ("1.0", "polysilicon", 1, "off", "raise AssertionError"),
}

#: distribution → (state, reason, remedy)
EXPECTED = {
    "acme-good": ("active", "", ""),
    "acme-newer": (
        "incompatible",
        f"it needs polysilicon<100,>=99.1, but polysilicon {VERSION} is installed",
        "pip install 'polysilicon<100,>=99.1', or install the acme-newer that supports polysilicon "
        f"{MINOR}: pip install 'acme-newer<0.9.0'",
    ),
    "acme-older": (
        "incompatible",
        f"it needs polysilicon<0.0.5, but polysilicon {VERSION} is installed",
        "pip install 'polysilicon<0.0.5', or install the acme-older that supports polysilicon "
        f"{MINOR}: pip install 'acme-older>0.2.0'",
    ),
    "acme-next": (
        "incompatible",
        "it speaks plugin API 2 (entry-point group polysilicon.plugins.v2), but polysilicon "
        f"{VERSION} speaks 1",
        "pip install --upgrade polysilicon",
    ),
    "acme-broken": (
        "broken",
        "importing it failed: ModuleNotFoundError: No module named 'acme_toolchain'",
        "pip install --upgrade acme-broken, or report this to the authors of acme-broken",
    ),
    "acme-twin-a": (
        "broken",
        "both acme-twin-a 1.0 and acme-twin-b 1.1 register a plugin named 'twin'",
        "pip uninstall acme-twin-a, or pip uninstall acme-twin-b",
    ),
    "acme-twin-b": (
        "broken",
        "both acme-twin-a 1.0 and acme-twin-b 1.1 register a plugin named 'twin'",
        "pip uninstall acme-twin-a, or pip uninstall acme-twin-b",
    ),
    "acme-off": (
        "disabled",
        "POLYSILICON_DISABLE_PLUGINS=off names it",
        "take off out of POLYSILICON_DISABLE_PLUGINS",
    ),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with core and all the distributions; without torch."""
    folder = tmp_path_factory.mktemp("states")
    wheels = [
        make_wheel(
            folder,
            name,
            version,
            metadata=f"Requires-Dist: {requires}",
            entry_points=f"[polysilicon.plugins.v{major}]\n{plugin} = {name.replace('-', '_')}\n",
            code=code,
        )
        for name, (version, requires, major, plugin, code) in DISTRIBUTIONS.items()
    ]
    home = folder / "environment"
    run(uv(), "venv", "--quiet", "--python", sys.executable, home)
    install = (uv(), "pip", "install", "--quiet", "--python", home / "bin" / "python")
    run(*install, "pluggy>=1.6,<2", "packaging>=24", "typer>=0.15", "rich>=13.7")
    run(*install, "--no-deps", CORE, *wheels)
    return home / "bin" / "polysilicon"


@pytest.fixture(scope="module")
def rows(environment: Path) -> Mapping[str, Mapping[str, str]]:
    """`polysilicon plugins --json`, by distribution."""
    told = _ask(environment, "plugins")
    return {row["distribution"]: row for row in told["plugins"]}


def _ask(polysilicon: Path, command: str) -> dict[str, list[dict[str, str]]]:
    off = {"POLYSILICON_DISABLE_PLUGINS": "off"}
    told: dict[str, list[dict[str, str]]] = json.loads(
        run(polysilicon, command, "--json", PYTHONPATH="", **off)
    )
    return told


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_state_reason_and_remedy(rows: Mapping[str, Mapping[str, str]], distribution: str) -> None:
    row = rows[distribution]
    assert (row["state"], row["reason"], row["remedy"]) == EXPECTED[distribution]


def test_core_stays_active(rows: Mapping[str, Mapping[str, str]]) -> None:
    assert (rows["polysilicon"]["state"], rows["polysilicon"]["version"]) == ("active", VERSION)


def test_the_working_plugin_beside_them_works(environment: Path) -> None:
    names = [device["name"] for device in _ask(environment, "devices")["devices"]]
    assert names == ["good:x1", "cpu"]
