"""`polysilicon run`: text, tables, JSON, conversations and batches over a tiny random model."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_model import FakeTokenizer
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from polysilicon import loading
from polysilicon.cli import build
from polysilicon.errors import LoadError
from polysilicon.loading.loader import Loaded

if TYPE_CHECKING:
    from pathlib import Path


class ChatTokenizer(FakeTokenizer):
    """A turn is `role text` with a word between turns; 49 is not needed."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        turns = [f"{message['role']} {message['content']} end " for message in messages]
        return "".join(turns) + "assistant "


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: Any) -> Loaded:
        if name == "missing":
            raise LoadError("there is no model 'missing'")
        torch.manual_seed(1)
        config = copy.deepcopy(CONFIGS["llama"])
        config.vocab_size = 50
        model = AutoModelForCausalLM.from_config(config).eval()
        tokenizer: Any = ChatTokenizer() if name == "smollm2" else FakeTokenizer()
        return Loaded(
            model=model,
            tokenizer=tokenizer,
            config=model.config,
            name=name,
            chat_template=bool(tokenizer.chat_template),
        )

    monkeypatch.setattr(loading, "load", load, raising=False)


def run(*arguments: str, typed: str = "") -> Any:
    return CliRunner().invoke(
        build("run"), ["run", "--max-new-tokens", "5", *arguments], input=typed
    )


def test_a_prompt_gives_text_and_the_tables() -> None:
    result = run("hello")
    assert result.exit_code == 0, result.output
    for said in ("time to first token", "cpu", "paged_attention.torch", "reason"):
        assert said in result.stdout


def test_json_is_one_object_with_the_documented_fields() -> None:
    result = run("hello", "--json")
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    assert len(data["token_ids"]) == 5
    assert data["prompt_tokens"] == len("user hello end assistant ")
    assert data["ttft_s"] > 0
    assert data["tokens_per_s"] > 0
    assert data["device"] == "cpu"
    assert {"op", "kernel", "reason"} <= data["ops"][0].keys()
    assert isinstance(data["text"], str)


def test_a_batch_gives_one_object_a_line_and_errors_stay_in_theirs(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\n" + "a" * 300 + "\nworld\n", encoding="utf-8")
    result = run("--batch", str(file), "--json")
    good, bad, last = (json.loads(line) for line in result.stdout.splitlines())
    assert "the context holds 256" in bad["error"]
    assert [good["prompt"], last["prompt"]] == ["hello", "world"]
    assert len(good["token_ids"]) == len(last["token_ids"]) == 5
    assert result.exit_code == 1


def test_a_batch_prints_prompts_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nworld\n", encoding="utf-8")
    result = run("--batch", str(file))
    assert result.exit_code == 0
    assert result.stdout.index("> hello") < result.stdout.index("> world")


def test_a_second_turn_reuses_the_first() -> None:
    result = run("--chat", "--json", "--temperature", "0", typed="hello\n\nagain\n")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["reused_tokens"] == 0
    # All but the last token of the first turn, which was sampled and never computed.
    assert second["reused_tokens"] >= first["prompt_tokens"]
    assert second["prompt_tokens"] == second["prefilled_tokens"] + second["reused_tokens"]


def test_a_turn_that_is_too_long_does_not_end_the_conversation() -> None:
    result = run("--chat", "--json", typed="a" * 300 + "\nhello\n")
    assert "the context holds 256" in result.stderr
    assert len(json.loads(result.stdout)["token_ids"]) == 5
    assert result.exit_code == 1


def test_a_chat_needs_a_template() -> None:
    result = run("--chat", "--model", "plain", typed="hello\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "--json"], "the prompt is empty"),
        (["hi", "--temperature", "nan"], "temperature is nan"),
        (["hi", "--temperature=-1"], "temperature is -1.0"),
        (["hi", "--top-p", "0"], "top_p is 0.0"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["hi", "--device", "toaster"], "there is no device 'toaster'"),
        (["hi", "--model", "missing"], "there is no model 'missing'"),
        (["--batch", "no/such/file"], "cannot be read"),
        ([], "exactly one of PROMPT, --chat and --batch"),
        (["hi", "--chat"], "exactly one of PROMPT, --chat and --batch"),
    ],
)
def test_bad_input_gives_one_error_and_nothing_on_standard_output(
    arguments: list[str], said: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_a_device_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_DEVICE", "toaster")
    result = run("hi")
    assert result.exit_code == 2
    assert "there is no device 'toaster'" in result.stderr
    assert result.stdout == ""
