"""Every kind of bad plugin costs only itself and is listed with its state and reason."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import polysilicon
from polysilicon import discovery, selection
from polysilicon.devices import find
from polysilicon.errors import PluginError, PolysiliconWarning
from polysilicon.plugins import answers, checked, gather, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from polysilicon.discovery import PluginStatus

    Install = Callable[..., None]

BAD = (
    "raises",
    "importerror",
    "too_new",
    "too_old",
    "api2",
    "twin_a",
    "twin_b",
    "kernel_twin_a",
    "kernel_twin_b",
    "core_twin",
    "unknown_hook",
    "unknown_argument",
    "wrapper",
    "unmarked",
    "wrong_record",
    "bad_record",
    "exits",
)


def _rows() -> dict[str, PluginStatus]:
    return {row.name: row for row in polysilicon.plugins()}


def test_core_alone_is_one_active_plugin_with_all_hooks(fresh: None) -> None:
    (row,) = polysilicon.plugins()
    assert (row.name, row.state) == ("core", "active")
    assert row.hooks == ("polysilicon_devices", "polysilicon_kernels", "polysilicon_layouts")


def test_good_plugin_is_active_and_its_answers_carry_their_origin(install: Install) -> None:
    install("good")
    assert _rows()["acme"].state == "active"
    assert [device.name for device in polysilicon.devices()] == ["acme:x1", "cpu"]
    kernels = selection.current_table().kernels["acme:x1"]
    (own,) = [entry for entry in kernels if entry.record.name == "silu_and_mul.acme"]
    assert str(own.origin) == "acme-good 1.2"
    assert selection.current_table().layout(polysilicon.devices()[0], "linear_weight").record.pack


@pytest.mark.parametrize(
    ("folder", "name", "state", "reason"),
    [
        ("raises", "raiser", "broken", "raised OSError: driver is asleep ("),
        ("importerror", "missing", "broken", "importing it failed: ModuleNotFoundError"),
        ("exits", "exits", "broken", "importing it failed: SystemExit"),
        ("too_new", "newer", "incompatible", "it needs polysilicon<100,>=99.1, but polysilicon"),
        ("too_old", "older", "incompatible", "it needs polysilicon<0.0.5, but polysilicon"),
        ("api2", "next", "incompatible", "it speaks plugin API 2"),
        ("unknown_hook", "unknown-hook", "broken", "(did you mean polysilicon_kernels?): the"),
        ("unknown_argument", "unknown-argument", "broken", "core gives that hook"),
        ("wrapper", "wrapper", "broken", "is a wrapper"),
        ("unmarked", "unmarked", "broken", "polysilicon_devices is not marked as a hook"),
        ("wrong_record", "wrong-record", "broken", "returned str, expected Device"),
        ("bad_record", "bad-record", "broken", "expected 'package.module:attribute'"),
        ("core_twin", "core-twin", "broken", "the name 'linear.torch' is provided by both"),
    ],
)
def test_bad_plugin_costs_only_itself(
    install: Install, folder: str, name: str, state: str, reason: str
) -> None:
    install("good", folder)
    rows = _rows()
    assert (rows[name].state, rows["acme"].state, rows["core"].state) == (state, "active", "active")
    assert reason in rows[name].reason
    assert rows[name].remedy
    assert [entry.record.name for entry in gather().devices] == ["acme:x1", "cpu"]


def test_optional_hook_that_this_core_does_not_know_is_left_alone(install: Install) -> None:
    install("optional_hook")
    assert _rows()["optional-hook"].state == "active"
    assert "later" in [device.name for device in polysilicon.devices()]


def test_all_bad_plugins_together_leave_core_and_the_good_one(install: Install) -> None:
    install("good", *BAD)
    active = [row.name for row in polysilicon.plugins() if row.state == "active"]
    assert active == ["acme", "core"]
    assert len(polysilicon.plugins()) == len(BAD) + 2


@pytest.mark.parametrize("folder", ["too_new", "too_old", "api2"])
def test_incompatible_plugin_is_never_imported(install: Install, folder: str) -> None:
    install(folder)
    assert [row.state for row in polysilicon.plugins()] == ["incompatible", "active"]
    assert f"acme_{folder}" not in sys.modules


def test_one_plugin_name_in_two_distributions_uses_neither_and_names_both(install: Install) -> None:
    install("twin_a", "twin_b")
    twins = [row for row in polysilicon.plugins() if row.name == "twin"]
    assert [row.state for row in twins] == ["broken", "broken"]
    assert "acme-twin-a 1.0 and acme-twin-b 1.0" in twins[0].reason
    assert "acme_twin_a" not in sys.modules


def test_one_kernel_name_in_two_plugins_uses_neither_and_names_both(install: Install) -> None:
    install("kernel_twin_a", "kernel_twin_b")
    rows = _rows()
    for name in ("kernel-twin-a", "kernel-twin-b"):
        assert rows[name].state == "broken"
        assert "acme-kernel-twin-a 1.0 and acme-kernel-twin-b 1.0" in rows[name].reason


def test_too_new_plugin_is_told_once_with_both_pip_commands(install: Install) -> None:
    install("too_new")
    with pytest.warns(PolysiliconWarning) as told:
        checked()
    checked()  # a second warning would be an error here
    (warning,) = told
    text = str(warning.message)
    assert "acme-too-new 0.9.0 was not loaded: it needs polysilicon<100,>=99.1" in text
    assert "pip install 'polysilicon<100,>=99.1'" in text
    assert "pip install 'acme-too-new<0.9.0'" in text
    assert "POLYSILICON_DISABLE_PLUGINS=newer" in text


def test_too_old_plugin_is_sent_to_a_newer_release(install: Install) -> None:
    install("too_old")
    assert "pip install 'acme-too-old>0.2.0'" in _rows()["older"].remedy


def test_strict_turns_the_warning_into_an_error(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("importerror")
    monkeypatch.setenv("POLYSILICON_STRICT", "1")
    with pytest.raises(PluginError, match="acme_toolchain_that_is_not_installed"):
        checked()


def test_deny_list_disables_before_import_and_without_a_word(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good", "importerror")
    monkeypatch.setenv("POLYSILICON_DISABLE_PLUGINS", "missing, acme")
    checked()
    assert {row.name: row.state for row in answers().plugins} == {
        "acme": "disabled",
        "missing": "disabled",
        "core": "active",
    }
    assert "acme_good" not in sys.modules


def test_star_in_the_deny_list_disables_all_but_core(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good", "raises")
    monkeypatch.setenv("POLYSILICON_DISABLE_PLUGINS", "*")
    assert [row.state for row in polysilicon.plugins()] == ["disabled", "disabled", "active"]


def test_allow_list_disables_the_rest(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("good", "raises")
    monkeypatch.setenv("POLYSILICON_PLUGINS", "acme")
    assert {row.name: row.state for row in checked().plugins} == {
        "acme": "active",
        "raiser": "disabled",
        "core": "active",
    }


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("newer", "is incompatible: it needs polysilicon"), ("acne", "did you mean acme")],
)
def test_allow_list_fails_for_what_cannot_be_had(
    install: Install, monkeypatch: pytest.MonkeyPatch, asked: str, expected: str
) -> None:
    install("good", "too_new")
    monkeypatch.setenv("POLYSILICON_PLUGINS", asked)
    if asked == "acne":
        monkeypatch.setattr(discovery, "switched_off", lambda name: None)
    with pytest.raises(PluginError, match=expected):
        checked()


def test_use_of_a_broken_plugin_by_name_says_why(install: Install) -> None:
    install("importerror")
    with (
        pytest.warns(PolysiliconWarning),
        pytest.raises(PluginError, match=r"'missing' .* is broken: importing it failed"),
    ):
        polysilicon.use("missing")


def test_require_gives_the_row_of_an_active_plugin(install: Install) -> None:
    install("good")
    assert require("acme").distribution == "acme-good"


def test_plugin_may_not_take_the_name_of_core(fresh: None) -> None:
    row = discovery.PluginStatus(name="core", distribution="acme-core", version="1")
    plugin = discovery.Plugin(row)
    discovery.refuse_same_names([plugin])
    assert plugin.status.state == "broken"
    assert "core's own name" in plugin.status.reason


def test_hook_polysilicon_devices_answers_stand_before_cores(install: Install) -> None:
    install("good")
    assert [str(entry.origin.plugin) for entry in answers().devices] == ["acme", "core"]


def test_hook_polysilicon_layouts_is_asked_for_every_device(install: Install) -> None:
    install("good")
    names = {
        device: [entry.record.name for entry in layouts if entry.origin.plugin == "acme"]
        for device, layouts in answers().layouts.items()
    }
    assert names == {"acme:x1": ["acme.tiles"], "cpu": []}


def test_hook_polysilicon_kernels_may_answer_for_other_devices(install: Install) -> None:
    install("good")
    for kernels in answers().kernels.values():
        assert "silu_and_mul.acme" in [entry.record.name for entry in kernels]


def test_deny_list_names_an_unknown_plugin(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_DISABLE_PLUGINS", "acne")
    with pytest.warns(PolysiliconWarning, match="DISABLE_PLUGINS names 'acne', which is not"):
        checked()


def test_a_wrong_value_of_strict_is_an_error(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_STRICT", "maybe")
    with pytest.raises(ValueError, match="POLYSILICON_STRICT is 'maybe': expected '1' or '0'"):
        checked()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("Device(name='late:x', kind='late')", "returned a single Device, expected a list of"),
        ("7", "returned int, expected a list of Device"),
        ("1 / 0", "ZeroDivisionError: division by zero ("),
        ("[Device(name='gate', kind='late')]", "expected the name 'late' or 'late:…'"),
    ],
)
def test_a_device_that_breaks_when_asked_for_is_told_by_its_plugin(
    answer: str, reason: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    info = tmp_path / "acme_late-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polysilicon.plugins.v1]\nlate = acme_late\n")
    (tmp_path / "acme_late.py").write_text(
        "from polysilicon.api import Device, forced_device, hookimpl\n\n\n"
        "@hookimpl\ndef polysilicon_devices():\n"
        f"    return {answer} if forced_device() else []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as told:
        find("late:x")
    assert "plugin 'late' (acme-late 1.0) is broken" in str(told.value)
    assert reason in str(told.value)
