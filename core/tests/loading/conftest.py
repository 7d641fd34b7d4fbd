"""Tiny models as folders, made by the tests themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from loading_models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def folder(tmp_path: Path, llama: Any) -> Path:
    llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path, llama: Any) -> Path:
    llama.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"
