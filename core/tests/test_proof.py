"""Proof before use: right kernels serve, wrong ones are refused, slow ones are demoted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import fake_kernels
import pytest
import torch
from tables import ACME, CPU, kernel, opaque, problem, table

from polysilicon import ops
from polysilicon.errors import PolysiliconWarning
from polysilicon.layers.base import Layer
from polysilicon.prepare import Prepared, prepare
from polysilicon.proof import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from polysilicon.records import Device, Kernel, Problem

pytestmark = pytest.mark.usefixtures("fresh", "one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels wait for no second thread, which a busy machine would make slow at random."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: All tokens of the problem that `_prepare` states.
ALL = "1–64"


class Gate(Layer):
    """A layer of one op."""

    def __init__(self, asked: Problem) -> None:
        super().__init__()
        self.asked = asked

    def problems(self) -> dict[str, Problem]:
        return {"silu_and_mul": self.asked}


def _prepare(*kernels: Kernel, device: Device = CPU) -> Prepared:
    # So wide that one token takes far longer than the call, and few tokens are enough.
    model = torch.nn.Sequential(Gate(problem(1, 64, width=4096)))
    return prepare(model, device, table=table(*kernels, device=device))


def _served(prepared: Prepared) -> list[tuple[str, str]]:
    return [(row.kernel.removeprefix("silu_and_mul."), row.tokens) for row in prepared.rows]


def _reason(prepared: Prepared, name: str) -> str:
    (binding,) = prepared.bindings
    rows = {one.provided.record.name: one.reason for one in binding.candidates}
    return rows[f"silu_and_mul.{name}"]


@pytest.mark.parametrize("make", [kernel, opaque])
def test_right_kernel_serves(make: type) -> None:
    fast = make("right", name=f"silu_and_mul.right_{make.__name__}", rank=1)
    # It is the portable kernel by another name: the times differ by noise only.
    assert _served(_prepare(fast)) == [(f"right_{make.__name__}", ALL)]


@pytest.mark.parametrize("bad", ["wrong", "wrong_at_three", "raises"])
def test_wrong_kernel_is_refused_with_what_was_measured(bad: str) -> None:
    prepared = _prepare(kernel(bad, rank=1))
    assert _served(prepared) == [("torch", ALL)]
    assert "refused by proof" in _reason(prepared, bad)
    told = {"raises": "it raised RuntimeError: misaligned address"}
    assert told.get(bad, "expected") in _reason(prepared, bad)


def test_slow_kernel_is_demoted_with_its_ratio() -> None:
    prepared = _prepare(kernel("slow", rank=1))
    assert _served(prepared) == [("torch", ALL)]
    assert "× the time of the portable kernel" in _reason(prepared, "slow")


def test_kernel_is_timed_in_the_bucket_in_which_it_would_serve() -> None:
    asked = kernel("slow_if_many", rank=1, tokens=(1, 16))
    assert _served(_prepare(asked)) == [("slow_if_many", "1–16"), ("torch", "17–64")]
    assert _served(_prepare(replace(asked, tokens=(17, 64)))) == [("torch", ALL)]


def test_kernel_is_held_only_to_what_it_claims() -> None:
    def wide(asked: Problem) -> str | None:
        return None if int(asked.fact("width") or 0) % 64 == 0 else "width is no multiple of 64"

    assert _served(_prepare(kernel("needs_64", rank=1, supports=wide))) == [("needs_64", ALL)]
    boasts = kernel("needs_64", name="silu_and_mul.boasts", rank=1)
    assert _served(_prepare(boasts)) == [("torch", ALL)]
    few = kernel("needs_16_tokens_or_less", rank=1, tokens=(1, 16))
    assert _served(_prepare(few))[0] == ("needs_16_tokens_or_less", "1–16")


class Ranks:
    """Stands in for torch.distributed: one process as one of two ranks."""

    def __init__(self, rank: int, told: list[object]) -> None:
        self.rank, self.told = rank, told

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        return self.rank

    def broadcast_object_list(self, box: list[object], src: int) -> None:
        assert src == 0
        if self.rank == 0:
            self.told += box
        else:
            box[:] = [self.told.pop(0)]


def test_rank_0_decides_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[object] = []
    monkeypatch.setattr(torch, "distributed", Ranks(0, told))
    first = _prepare(kernel("wrong", rank=1))
    monkeypatch.setattr(torch, "distributed", Ranks(1, told))
    monkeypatch.setenv("POLYSILICON_CACHE_DIR", str(tmp_path / "of the other rank"))
    # On this rank the kernel would be right; what rank 0 found holds.
    monkeypatch.setattr(fake_kernels, "wrong", fake_kernels.right)
    second = _prepare(kernel("wrong", rank=1))
    assert (_served(second), second.fingerprint) == (_served(first), first.fingerprint)
    assert told == []


def test_speed_is_not_judged_on_a_simulated_device() -> None:
    simulated = replace(CPU, name="acme:sim", kind="acme", simulated=True)
    assert _served(_prepare(kernel("slow", rank=1), device=simulated)) == [("slow", ALL)]
    assert _served(_prepare(kernel("wrong", rank=1), device=simulated)) == [("torch", ALL)]


def test_proof_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    assert _served(_prepare(kernel("wrong", rank=1))) == [("wrong", ALL)]


def test_any_other_setting_of_the_switch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_PROOF", "maybe")
    with pytest.raises(ValueError, match="POLYSILICON_PROOF is 'maybe': expected 'on' or 'off'"):
        _prepare(kernel("right", rank=1))


def test_cores_own_kernels_are_not_proven() -> None:
    assert _served(_prepare()) == [("torch", ALL)]
    assert not cache_folder().exists()


def test_verdicts_are_cached_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _prepare(kernel("wrong", rank=1))
    (file,) = cache_folder().iterdir()
    assert [row["state"] for row in json.loads(file.read_text()).values()] == ["wrong"]
    monkeypatch.setattr(fake_kernels, "wrong", fake_kernels.right)
    again = _prepare(kernel("wrong", rank=1))
    assert _reason(again, "wrong") == _reason(first, "wrong")
    assert again.fingerprint == first.fingerprint


def test_another_version_of_the_plugin_is_proven_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    _prepare(kernel("wrong", rank=1))
    monkeypatch.setattr(fake_kernels, "wrong", fake_kernels.right)
    monkeypatch.setattr("tables.ACME", replace(ACME, version="1.3"))
    assert _served(_prepare(kernel("wrong", rank=1))) == [("wrong", ALL)]


def test_edited_kernel_is_proven_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _reason(_prepare(kernel("wrong", rank=1)), "wrong")
    monkeypatch.setattr(fake_kernels, "wrong", torch.nn.functional.silu)  # in another file
    after = _reason(_prepare(kernel("wrong", rank=1)), "wrong")
    assert after != before
    assert "refused by proof" in after


def test_damaged_cache_is_told_and_built_anew() -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "proof-1.json").write_text("{")
    with pytest.warns(PolysiliconWarning, match="cannot be read"):
        prepared = _prepare(kernel("wrong", rank=1))
    assert _served(prepared) == [("torch", ALL)]


def test_fingerprint_tells_verdicts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = _prepare(kernel("wrong", rank=1))
    monkeypatch.setenv("POLYSILICON_PROOF", "off")
    assert _prepare(kernel("wrong", rank=1)).fingerprint != proven.fingerprint


#: The others are proven on their samples only: no fact of a problem changes their shapes much.
UNSHAPED = {"rotary_cos_sin", "rotary_embedding", "activation", "sampling", "dequantize"}
SHAPED = sorted(set(ops.NAMES) - UNSHAPED)


@pytest.mark.parametrize("name", SHAPED)
def test_problem_inputs_are_a_call_of_the_op(name: str) -> None:
    from polysilicon.records import Problem
    from polysilicon.selection import bind

    op = ops.get(name)
    assert op.inputs is not None
    asked = Problem(op=name, dtype="float32")
    device = torch.device("cpu")
    with torch.inference_mode():
        for tokens in (1, 3, 20):
            kwargs = dict(op.inputs(asked, tokens, torch.float32, device))
            assert op.tokens(next(iter(kwargs.values()))) == tokens
            bind(asked, device="cpu").fn(**kwargs)
