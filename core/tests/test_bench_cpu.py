"""`bench cpu` on a tiny model: what it measures and prints, not how fast it is."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from polysilicon.bench import cpu
from polysilicon.bench.cpu_sides import Transformers, Work
from polysilicon.bench.memory import read_gb_s, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RATIOS = ("decode_batch1_ratio", "mixed_ratio", "prefill_ratio")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


class Clock:
    """A side that takes the seconds it is told."""

    def __init__(self, seconds: Sequence[float], calls: list[str], name: str) -> None:
        self._seconds, self._calls, self._name = iter(seconds), calls, name

    def prefill(self, prompt: Any) -> float:
        self._calls.append(self._name)
        return next(self._seconds)


def test_sides_take_turns_and_the_ratio_is_the_median_of_the_rounds() -> None:
    calls: list[str] = []
    sides: Any = {
        "theirs": Clock([3.0, 30.0, 3.0], calls, "theirs"),
        "ours": Clock([1.0, 10.0, 2.0], calls, "ours"),
    }
    seconds = cpu._rounds(sides, 3, [()] * 3, lambda side, ids: side.prefill(ids))
    assert calls == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
    assert cpu._ratio(seconds, "ours", "theirs") == 3.0


def test_their_side_generates_exactly_what_is_wanted_from_left_padded_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    generate = model.generate

    def noted(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((ids, options["attention_mask"], options["max_new_tokens"]))
        out: torch.Tensor = generate(ids, **options)
        return out

    monkeypatch.setattr(model, "generate", noted)
    side = Transformers(model, compiled=False, batch=2)
    works = [Work(prompt=(5,) * n, wanted=w) for n, w in ((3, 2), (1, 6), (4, 3))]
    assert side.serve(works) > 0
    assert [entry[2] for entry in seen] == [6, 3]
    assert seen[0][0].tolist() == [[5, 5, 5], [0, 0, 5]]
    assert seen[0][1].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert side.decode(Work(prompt=(5, 6), wanted=4)) > 0


def test_tied_weights_are_read_once_a_token(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert weight_bytes(model) == sum(p.numel() * 4 for p in model.parameters())
    assert weight_bytes(model) < sum(v.numel() * 4 for v in model.state_dict().values())


def test_bandwidth_is_a_plausible_number() -> None:
    assert 0.1 < read_gb_s(size=8 << 20, passes=2) < 10_000


def test_the_command_prints_one_json_object_and_measures_every_side(folder: Path) -> None:
    from polysilicon.cli import build

    options = ["--quick", "--no-compiled", "--only", "models", "--json", "--model", str(folder)]
    arguments = ["bench", "cpu", *options]
    ran = CliRunner().invoke(build(), arguments)
    assert ran.exit_code == 0, ran.output
    data = json.loads(ran.stdout)
    assert data["schema"] == 1
    assert all(data[name] > 0 for name in (*RATIOS, "memory_gb_s", "weight_bytes"))
    assert "compiled_decode_ratio" not in data
    for figure in ("decode_tokens_s", "prefill_s", "mixed_tokens_s", "memory_fraction"):
        assert set(data[figure]) == {"theirs", "ours"}
    assert data["setup"]["torch"] == metadata.version("torch")
    assert 0 <= data["setup"]["others_cpu_share"] <= 1


def test_the_table_shows_both_sides_and_the_memory() -> None:
    from rich.console import Console

    by_side = {"theirs": 10.0, "ours": 20.0, "theirs_compiled": 30.0, "ours_compiled": 40.0}
    ratios = dict.fromkeys((*RATIOS, "compiled_decode_ratio"), 2.0)
    setup = cpu._setup("tiny", cpu.QUICK) | {"others_cpu_share": 0.5}
    result = cpu.Result(
        decode_tokens_s=by_side,
        prefill_s=by_side,
        mixed_tokens_s=by_side,
        ratios=ratios,
        memory_gb_s=50.0,
        weight_bytes=500_000_000,
        setup=setup,
    )
    console = Console(file=sys.stdout, width=120, record=True)
    console.print(result)
    text = console.export_text()
    assert "20.0 tokens/s (20% of memory)" in text
    assert "30.0 tokens/s (30% of memory)" in text
    assert "50.0 GB/s read" in text
    assert "other processes used 50% of the processor" in text


def test_our_own_work_is_not_counted_as_that_of_others() -> None:
    others = cpu.OtherProcesses()
    sum(range(1_000_000))
    assert 0 <= others.share() <= 1
