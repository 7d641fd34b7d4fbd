"""Hugging Face folders: what loads, and one clear error for each kind of damage."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_models import logits, tiny_model

from polysilicon.errors import DeviceError, LoadError
from polysilicon.loading import load, memory


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def cut(path: Path, share: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))


def test_a_folder_gives_the_saved_logits(folder: Path, llama: Any) -> None:
    loaded = load(folder)
    assert torch.equal(logits(loaded.model), logits(llama))
    assert not loaded.model.training
    assert (loaded.name, loaded.tokenizer, loaded.chat_template) == ("model", None, False)


def test_a_sharded_folder_gives_the_saved_logits(sharded: Path, llama: Any) -> None:
    assert torch.equal(logits(load(str(sharded)).model), logits(llama))


def test_the_asked_dtype_is_the_one_that_casting_gives(folder: Path, llama: Any) -> None:
    loaded = load(folder, dtype="bfloat16")
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, llama.state_dict()[name].to(torch.bfloat16)), name


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model: Any = load(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_merged_expert_weights_load_through_transformers_own_conversion(tmp_path: Path) -> None:
    model = tiny_model("mixtral", num_local_experts=4, head_dim=16)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path).model), logits(model))


def test_the_generation_config_of_the_folder_is_used(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    model: Any = load(folder).model
    assert model.generation_config.eos_token_id == [2, 5]


def test_loading_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"network: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(folder)


def test_the_model_outlives_its_files(folder: Path, llama: Any) -> None:
    model = load(folder).model
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(logits(model), logits(llama))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    with pytest.raises(LoadError, match=r"lacks 1 of \d+ shards .*model-00002"):
        load(sharded)


@pytest.mark.parametrize("share", [0.9, 0.01, 0.0], ids=["data", "header", "empty"])
def test_a_shard_that_is_cut_off_says_so(sharded: Path, share: float) -> None:
    cut(sorted(sharded.glob("*.safetensors"))[0], share)
    with pytest.raises(LoadError, match=r"model-00001.* is cut off"):
        load(sharded)


def test_an_index_that_names_an_absent_tensor_says_so(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = sorted(index["weight_map"].values())[0]
    path.write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"model\.extra\.weight.* but it does not"):
        load(sharded)


def test_an_index_cannot_leave_its_folder(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(LoadError, match="expected a file beside it"):
        load(sharded)


def test_a_damaged_header_says_so(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[20:60] = b"\xff" * 40
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match="damaged safetensors header"):
        load(folder)


@pytest.mark.parametrize("key", ["model_type", "architectures"])
def test_a_config_without_architecture_says_what_to_add(folder: Path, key: str) -> None:
    edit_config(folder, **{key: None})
    with pytest.raises(LoadError, match=f"names no {key}: expected e.g."):
        load(folder)


def test_unknown_model_types_and_architectures_are_named(folder: Path) -> None:
    edit_config(folder, architectures=["NoSuchForCausalLM"])
    with pytest.raises(LoadError, match="architecture 'NoSuchForCausalLM', which transformers"):
        load(folder)
    edit_config(folder, model_type="nosuch")
    with pytest.raises(LoadError, match="model_type 'nosuch', which transformers"):
        load(folder)


def test_a_model_that_generates_no_text_is_refused(folder: Path) -> None:
    edit_config(folder, model_type="vit", architectures=["ViTModel"])
    with pytest.raises(LoadError, match="no causal language model"):
        load(folder)


def test_config_that_is_not_json_or_absent(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(LoadError, match="is not readable JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match=r"config\.json does not exist"):
        load(folder)


def test_a_folder_without_weights_says_what_is_expected(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"has no weights: expected model\.safetensors"):
        load(folder)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(LoadError, match="weights missing"):
        load(folder)
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(LoadError, match="weights unknown to the model"):
        load(folder)
    edit_config(folder, num_hidden_layers=2, intermediate_size=80)
    with pytest.raises(LoadError, match="of another shape than its config says"):
        load(folder)


def test_other_quantised_checkpoints_are_refused_by_name(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(LoadError, match="quant_method is 'bitsandbytes', expected one of"):
        load(folder)


def test_pickled_weights_need_the_flag(folder: Path, llama: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(llama.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="allow_pickle=True"):
        load(folder)
    assert torch.equal(logits(load(folder, allow_pickle=True).model), logits(llama))


def test_a_pickle_that_would_run_code_is_refused_even_with_the_flag(
    folder: Path, tmp_path: Path
) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "model.safetensors").unlink()
    torch.save({"x": Attack()}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="no pickled state dict of plain tensors"):
        load(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_remote_code_runs_only_when_asked_for(
    folder: Path, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(folder, model_type="own", architectures=["OwnModel"], auto_map=code)
    with pytest.raises(LoadError, match="trust_remote_code=True"):
        load(folder)
    loaded = load(folder, trust_remote_code=True)
    assert type(loaded.model).__name__ == "OwnModel"
    assert torch.equal(logits(loaded.model), logits(llama))


def test_too_little_memory_is_said_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100_000)
    with pytest.raises(LoadError, match=r"needs 0\.\d+ GB in float32 and 0\.00 GB are free"):
        load(folder)


def test_available_memory_is_positive() -> None:
    assert memory.available_bytes() > 1 << 20


@pytest.mark.parametrize("dtype", ["float", "fp8", "int8", torch.int32])
def test_a_wrong_dtype_lists_the_right_ones(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="one of float32, bfloat16, float16, float64"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["nonsense", "cuda:7"])
def test_a_device_that_is_not_there_is_named(folder: Path, device: str) -> None:
    with pytest.raises(DeviceError, match=f"'{device}'"):
        load(folder, device=device)
