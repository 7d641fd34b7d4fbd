"""GGUF files: equal logits for every listed architecture, and one clear error for each damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_writing import write_gguf
from loading_models import logits, tiny_model

from polysilicon.errors import LoadError
from polysilicon.loading import load
from polysilicon.loading.gguf_config import MODEL_TYPES
from polysilicon.loading.gguf_header import read_header

if TYPE_CHECKING:
    from pathlib import Path

#: What makes each architecture differ from the plainest: head size apart from hidden / heads …
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "rms_norm_eps": 1e-5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "phi3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None, "tie_word_embeddings": False},
}


@pytest.fixture
def path(tmp_path: Path, llama: Any) -> Path:
    write_gguf(tmp_path / "tiny.gguf", llama, "llama")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("arch", MODEL_TYPES)
def test_every_listed_architecture_gives_the_written_logits(tmp_path: Path, arch: str) -> None:
    model = tiny_model(MODEL_TYPES[arch], **CHANGES[arch])
    write_gguf(tmp_path / "m.gguf", model, arch)
    loaded = load(tmp_path / "m.gguf")
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-5, atol=1e-6)


def test_blocks_become_the_values_they_stand_for(tmp_path: Path) -> None:
    kinds = (Kind.Q8_0, Kind.Q4_1, Kind.F16, Kind.Q5_0, Kind.BF16)
    model = tiny_model("qwen3", head_dim=32)
    write_gguf(tmp_path / "m.gguf", model, "qwen3", kinds)
    found = load(tmp_path / "m.gguf").model.state_dict()
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        kind = kinds[index % len(kinds)] if tensor.dim() == 2 else Kind.F32
        expected = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
        assert np.array_equal(found[name].numpy(), expected), name


def test_a_gguf_model_is_an_ordinary_one(path: Path, tmp_path: Path) -> None:
    model: Any = load(path, dtype="bfloat16").model
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.bfloat16
    )
    assert torch.equal(logits(model), logits(again))


def test_a_folder_with_one_gguf_file_is_that_file(path: Path) -> None:
    assert load(path.parent).name == "tiny"
    (path.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match=r"2 GGUF files: name one of other\.gguf, tiny\.gguf"):
        load(path.parent)


def test_metadata_keep_the_decimal_that_was_written(path: Path) -> None:
    assert read_header(path).get("attention.layer_norm_rms_epsilon") == 1e-6


def rewrite(path: Path, **more: Any) -> Path:
    """The same file with more metadata and tensors."""
    header, target = read_header(path), path.with_name("more.gguf")
    writer = gguf.GGUFWriter(target, more.pop("arch", "llama"))
    for key, value in {**header.metadata, **more.pop("metadata", {})}.items():
        if isinstance(value, str) and key != "general.architecture":
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    raw = np.fromfile(path, dtype=np.uint8)
    for t in header.tensors.values():
        data = raw[t.offset : t.offset + t.file_bytes].view(np.float32).reshape(t.shape)
        writer.add_tensor(t.name, data)
    for name, values in more.items():
        writer.add_tensor(name.replace("__", "."), np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_llama3_frequency_factors_reach_the_model(path: Path) -> None:
    factors = np.linspace(1, 8, 8)
    plain, scaled = load(path), load(rewrite(path, rope_freqs__weight=factors))
    expected = plain.model.model.rotary_emb.inv_freq / torch.tensor(factors, dtype=torch.float32)
    rotary: Any = scaled.model.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert rotary.attention_scaling == 1.0


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_reaches_the_config(path: Path, kind: str) -> None:
    metadata = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    rope = load(rewrite(path, metadata=metadata)).config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)


def test_an_unknown_rope_scaling_is_refused(path: Path) -> None:
    with pytest.raises(LoadError, match="rope scaling 'ntk'"):
        load(rewrite(path, metadata={"llama.rope.scaling.type": "ntk"}))


def test_a_tensor_without_a_place_is_refused(path: Path) -> None:
    with pytest.raises(LoadError, match=r"1 tensors that LlamaForCausalLM has no place for"):
        load(rewrite(path, blk__0__mystery__weight=np.ones(4)))


def test_a_chat_model_stops_at_its_end_of_turn(path: Path) -> None:
    model: Any = load(rewrite(path, metadata={"tokenizer.ggml.eot_token_id": 9})).model
    assert model.generation_config.eos_token_id == [2, 9]


def test_an_unsupported_architecture_lists_the_supported_ones(path: Path) -> None:
    with pytest.raises(LoadError, match="architecture 'mpt': expected one of llama, qwen2"):
        load(rewrite(path, arch="mpt"))


@pytest.mark.parametrize("share", [0.5, 0.02, 0.0001], ids=["data", "metadata", "magic"])
def test_a_file_that_is_cut_off_says_so(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: max(4, int(len(content) * share))])
    with pytest.raises(LoadError, match="is cut off"):
        load(path)


def test_wrong_magic_and_wrong_version_are_named(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(LoadError, match="starts with b'GGML', expected b'GGUF'"):
        load(path)
    path.write_bytes(content[:4] + b"\x09" + content[5:])
    with pytest.raises(LoadError, match="GGUF version 9: expected 2 or 3"):
        load(path)


def test_an_impossible_alignment_is_damage(path: Path) -> None:
    with pytest.raises(LoadError, match=r"is damaged \(general\.alignment is 0\)"):
        read_header(rewrite(path, metadata={"general.alignment": 0}))


def test_random_damage_to_the_header_is_always_a_load_error(path: Path) -> None:
    content, generator = path.read_bytes(), np.random.default_rng(3)
    for position in generator.integers(4, 700, size=60):
        damaged = bytearray(content)
        damaged[position : position + 4] = generator.bytes(4)
        path.write_bytes(damaged)
        try:
            read_header(path)  # not every byte matters to the header
        except LoadError:
            continue
