"""Devices: finding, forcing and activating them, and refusing to run on absent ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

import polysilicon
from polysilicon.devices import current, find, require_runnable
from polysilicon.errors import DeviceError, PolysiliconWarning
from polysilicon.explaining import explain
from polysilicon.plugins import answers
from polysilicon.records import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    Install = Callable[..., None]


def test_cpu_states_its_cores_memory_and_features(fresh: None) -> None:
    (cpu,) = polysilicon.devices()
    assert cpu.name == cpu.kind == "cpu"
    assert int(cpu.facts["cores"] or 0) >= 1
    assert cpu.memory_bytes is None or cpu.memory_bytes > 1 << 28
    assert isinstance(cpu.facts["features"], str)


@pytest.mark.parametrize("name", ["acme", "acme:x1", "acme:a1"])
def test_device_is_found_by_name_kind_or_architecture(install: Install, name: str) -> None:
    install("good")
    assert find(name).name == "acme:x1"


def test_device_of_a_plugin_is_current_where_there_is_one(install: Install) -> None:
    install("good")
    assert current().name == "acme:x1"
    polysilicon.use("cpu")
    assert current().name == "cpu"


def test_use_activates_once_and_an_import_never_does(install: Install) -> None:
    install("good")
    polysilicon.devices()
    activations = sys.modules["acme_good"].activations
    assert activations == []
    polysilicon.use("acme")
    polysilicon.use("acme:x1")
    assert activations == ["x1"]


def test_activation_that_raises_is_a_device_error(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    polysilicon.devices()
    monkeypatch.setattr("acme_good.activate", lambda: 1 / 0)
    with pytest.raises(DeviceError, match=r"acme:x1 could not be activated.*ZeroDivisionError"):
        polysilicon.use("acme")


def test_forced_absent_device_explains_and_refuses_to_run(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    monkeypatch.setenv("POLYSILICON_DEVICE", "acme:x2")
    assert current().name == "acme:x2"
    explanation = explain("silu_and_mul")
    reasons = {one.provided.record.name: one.reason for one in explanation.candidates}
    assert reasons["silu_and_mul.acme"] == "is for acme:a1, this is acme:x2"
    assert "(forced, absent)" in str(explanation)
    with pytest.raises(
        DeviceError, match=r"acme:x2 is forced and not on this machine.*acme:x1, cpu"
    ):
        require_runnable(current())


def test_chip_that_lacks_something_says_what(fresh: None) -> None:
    card = Device(
        name="acme:x3", kind="acme", present=False, facts={"unusable": "its driver isn't loaded"}
    )
    with pytest.raises(DeviceError, match=r"acme:x3 is on this machine.*its driver isn't loaded"):
        require_runnable(card)


def test_plugin_says_which_chips_it_knows(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    with pytest.raises(DeviceError, match=r"^acme knows no chip x0: there are acme:x1 and acme:x2"):
        explain("silu_and_mul", device="acme:x0")
    assert find("acme:x1").present  # the wrong name did no harm
    monkeypatch.setenv("POLYSILICON_DEVICE", "acme:x0")
    answers.cache_clear()
    with pytest.raises(DeviceError, match="acme knows no chip x0"):
        current()


def test_absent_chip_is_found_by_its_name_alone(install: Install) -> None:
    install("good")
    explanation = explain("silu_and_mul", device="acme:x2")
    assert not explanation.device.present
    assert current().name == "acme:x1"
    assert [device.name for device in polysilicon.devices()] == ["acme:x1", "acme:x2", "cpu"]
    with pytest.raises(DeviceError, match="acme:x2 is forced and not on this machine"):
        polysilicon.prepare(torch.nn.Linear(2, 2), "acme:x2")


def test_kind_alone_never_means_a_chip_that_was_only_asked_for(install: Install) -> None:
    install("good")
    assert not find("acme:x2").present
    assert find("acme").name == "acme:x1"
    assert find("acme:a2").name == "acme:x2"


def test_device_error_that_nobody_asked_for_breaks_only_the_plugin(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    import acme_good

    def unasked() -> None:
        raise DeviceError("no driver")

    monkeypatch.setattr(acme_good.polysilicon_devices, "__code__", unasked.__code__)
    monkeypatch.setitem(acme_good.__dict__, "DeviceError", DeviceError)
    with pytest.warns(PolysiliconWarning, match="raised a DeviceError unasked"):
        assert [device.name for device in polysilicon.devices()] == ["cpu"]


def test_forced_device_that_no_plugin_knows_is_an_error(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good")
    monkeypatch.setenv("POLYSILICON_DEVICE", "acme:x9")
    with pytest.raises(DeviceError, match=r"no device 'acme:x9' here.*acme:x1, cpu"):
        current()
