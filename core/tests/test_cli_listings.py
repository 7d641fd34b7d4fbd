"""The listings of the command line: JSON and nothing else, one-line errors, plugins' groups."""

from __future__ import annotations

import importlib
import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from polysilicon import cli
from polysilicon.commands.explain import _fact
from polysilicon.records import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result

    Install = Callable[..., None]

pytestmark = pytest.mark.usefixtures("fresh")


def _run(*arguments: str) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # what a plugin that is not loaded tells is tested elsewhere
        return CliRunner().invoke(cli.build(), list(arguments))


def _json(*arguments: str) -> Any:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    return data


def test_plugins_json_lists_name_version_state_and_reason(install: Install) -> None:
    install("good", "too_new", "importerror")
    rows = {row["name"]: row for row in _json("plugins")["plugins"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "acme": "active",
        "missing": "broken",
        "newer": "incompatible",
        "core": "active",
    }
    assert rows["acme"]["version"] == "1.2"
    assert "polysilicon<100,>=99.1" in rows["newer"]["reason"]


def test_devices_json_lists_the_devices(install: Install) -> None:
    install("good")
    assert [row["name"] for row in _json("devices")["devices"]] == ["acme:x1", "cpu"]


def test_device_name_is_shown_whole_at_80_columns(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arch = "quark:strange-accelerator-2", "strange-gen2"
    facts = {f"feature_{number}": "value" * 5 for number in range(9)}
    device = Device(name=name, kind="quark", arch=arch, memory_bytes=1 << 40, facts=facts)
    devices = importlib.import_module("polysilicon.devices")  # the package has a function so called
    monkeypatch.setattr(devices, "devices", lambda: [device])
    monkeypatch.setenv("COLUMNS", "80")
    shown = _run("devices").stdout
    assert name in shown
    assert arch in shown
    assert "…" not in shown


def test_kernels_json_lists_kernels_and_what_is_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYSILICON_DISABLE_KERNELS", "linear.torch_skinny")
    rows = _json("kernels", "--device", "cpu", "--op", "linear")["kernels"]
    states = {row["name"]: row["state"] for row in rows}
    assert states["linear.torch"] == "offered"
    assert states["linear.torch_skinny"] == "turned off by POLYSILICON_DISABLE_KERNELS"


def test_explain_json_takes_facts() -> None:
    data = _json(
        "explain", "linear", "--fact", "in=64", "--fact", "bias=true", "--dtype", "bfloat16"
    )
    assert data["facts"] == {"in": 64, "bias": True}
    assert data["candidates"][0]["chosen"]


@pytest.mark.parametrize("command", [["plugins"], ["devices"], ["kernels"], ["explain", "linear"]])
def test_tables_print(command: list[str]) -> None:
    result = _run(*command)
    assert result.exit_code == 0
    assert "polysilicon" in result.stdout or "cpu" in result.stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["explain", "rmsnorm"], "there is no op 'rmsnorm': one of rms_norm"),
        (["explain", "linear", "--fact", "widht=3"], "linear has no fact 'widht'"),
        (["explain", "linear", "--fact", "width"], "expected KEY=VALUE"),
        (["explain", "linear", "--dtype", "half"], "has dtype 'half'"),
        (["kernels", "--device", "cqu"], "there is no device 'cqu' here (did you mean cpu?)"),
        (["kernels", "--op", "lienar"], "there is no op 'lienar'"),
    ],
)
def test_mistake_is_one_line_on_standard_error(command: list[str], message: str) -> None:
    result = _run(*command)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_debug_shows_the_traceback() -> None:
    assert isinstance(_run("--debug", "explain", "rmsnorm").exception, ValueError)


def test_version_is_the_installed_one() -> None:
    import polysilicon

    assert _run("--version").stdout == f"polysilicon {polysilicon.__version__}\n"


def test_plugin_adds_its_command_group(install: Install) -> None:
    install("good")
    assert _run("acme", "tiles").stdout == "64\n"
    assert "acme" in _run("--help").stdout


@pytest.mark.parametrize(
    ("folder", "name", "reason"),
    [
        ("importerror", "missing", "acme_toolchain_that_is_not_installed"),
        ("too_new", "newer", "it needs polysilicon<100,>=99.1"),
    ],
)
def test_broken_command_group_costs_only_itself(
    install: Install, folder: str, name: str, reason: str
) -> None:
    install("good", folder)
    assert _run("acme", "tiles").exit_code == 0
    assert "(unavailable)" in _run("--help").stdout
    result = _run(name, "anything", "--at", "all")
    assert result.exit_code == 2
    assert reason in result.stderr


def test_disabled_plugin_has_no_command_group(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    monkeypatch.setenv("POLYSILICON_DISABLE_PLUGINS", "acme")
    assert _run("acme", "tiles").exit_code == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-5", 1e-5),
        ("a=true", True),
        ("a=None", None),
        ("a=tanh", "tanh"),
        ("a=", ""),
    ],
)
def test_facts_are_read_by_their_spelling(text: str, value: Any) -> None:
    assert _fact(text) == ("a", value)
    assert type(_fact(text)[1]) is type(value)
