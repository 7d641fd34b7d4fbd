"""Parts of models next to Transformers' own: what is measured and printed, not how fast it is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from polysilicon.bench import parts
from polysilicon.bench.parts import Part, measure_parts
from polysilicon.cli import build
from polysilicon.errors import KernelError

TINY = (
    Part(
        name="mixer",
        model="mamba2",
        path="backbone.layers.0.mixer",
        sizes={"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    ),
    Part(
        name="experts",
        model="mixtral",
        path="model.layers.0.mlp",
        sizes={
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
        },
        experts=True,
    ),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARTS", TINY)
    monkeypatch.setattr(parts, "PROMPT", 20)


@pytest.mark.usefixtures("tiny")
def test_mixers_run_a_prompt_and_a_step_and_experts_three_loads() -> None:
    rows = measure_parts(rounds=1)
    loads = [(row.part, row.load) for row in rows]
    assert loads[:2] == [("mixer", "prompt of 20"), ("mixer", "a step of 8")]
    assert loads[2:] == [("experts", f"{tokens} tokens") for tokens in (1, 8, 20)]
    assert all(min(row.theirs_s, row.ours_s, row.ratio) > 0 for row in rows)
    assert {row.theirs for row in rows[2:]} <= {"eager", "batched_mm", "grouped_mm"}


@pytest.mark.usefixtures("tiny")
def test_the_command_prints_the_parts_alone() -> None:
    ran = CliRunner().invoke(build(), ["bench", "cpu", "--quick", "--only", "parts", "--json"])
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.stdout)
    assert (data["schema"], len(data["parts"]), "prefill_s" in data) == (1, 5, False)
    assert set(data["parts"][0]) == {"part", "load", "theirs", "theirs_s", "ours_s", "ratio"}
    shown = CliRunner().invoke(build(), ["bench", "cpu", "--quick", "--only", "parts"])
    assert "a step of 8" in shown.stdout


def test_a_part_that_stays_transformers_own_is_no_comparison() -> None:
    part = Part(
        name="time mix",
        model="rwkv",
        path="rwkv.blocks.0.attention",
        sizes={"hidden_size": 32, "num_hidden_layers": 2, "context_length": 32},
    )
    with pytest.raises(KernelError, match=r"time mix: .* stayed Transformers' own"):
        measure_parts((part,), rounds=1)
