"""Loads a local Hugging Face folder."""

from __future__ import annotations

import math
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import torch
import transformers

from polysilicon.errors import LoadError
from polysilicon.loading import memory
from polysilicon.loading.assemble import fill, keeps_float32, model_class, skeleton
from polysilicon.loading.lazy import MappedTensor, PlainTensor, StackedTensor, WeightFile
from polysilicon.loading.quantized_config import read_quantization
from polysilicon.loading.quantized_model import replacements
from polysilicon.loading.quantized_tensors import find_weights, plain_tensors
from polysilicon.loading.quantizer import quantization_config
from polysilicon.loading.safetensors_folder import (
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    SINGLE,
    Entry,
    read_json,
    shards,
    weight_entries,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from polysilicon.loading.lazy import LazyTensor
    from polysilicon.loading.quantized_config import Quantization
    from polysilicon.loading.quantized_stacks import Stack

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_folder(
    folder: Path,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None],
    *,
    trust_remote_code: bool,
    allow_pickle: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model in `dtype` and the tokenizer of a folder that `save_pretrained` wrote.

    Code that the folder carries is run only with `trust_remote_code`; without it, a model type that
    Transformers knows itself is built from Transformers' own code.

    Raises:
        LoadError: files are missing, damaged, or of a kind refused unless asked for.
    """
    quantization = _quantization(folder / "config.json")
    config, remote = _config(folder, trust_remote_code)
    for part in (config, config.get_text_config(decoder=True)):
        # Ours to read: Transformers would ask for the method's own package.
        vars(part).pop("quantization_config", None)
    cls = model_class(config, folder, remote=remote)

    def wanted(name: str) -> torch.dtype:
        return torch.float32 if keeps_float32(cls, name) else dtype

    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        model = _fill_safetensors(folder, cls, config, dtype, wanted, on_bytes, quantization)
    elif quantization is not None:
        raise LoadError(
            f"{folder} has quantised weights ({quantization.method}) that are pickled: convert "
            "them to safetensors"
        )
    else:
        model = fill(cls, config, _pickled(folder, allow_pickle, wanted), dtype, folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = _checked(
            folder / "generation_config.json",
            lambda: transformers.GenerationConfig.from_pretrained(folder, local_files_only=True),
        )
    return model, _tokenizer(folder, trust_remote_code)


def _config(folder: Path, trust_remote_code: bool) -> tuple[PreTrainedConfig, bool]:
    """The config, and whether the model comes from the folder's own code."""
    path = folder / "config.json"
    raw = read_json(path)
    if not raw.get("model_type") or not raw.get("architectures"):
        absent = "model_type" if not raw.get("model_type") else "architectures"
        raise LoadError(
            f'{path} names no {absent}: expected e.g. "model_type": "llama" and '
            '"architectures": ["LlamaForCausalLM"]; fetch the file again'
        )
    known = raw["model_type"] in transformers.CONFIG_MAPPING
    remote = "auto_map" in raw and trust_remote_code
    if not remote:
        _check_known(path, raw, known)
    config: PreTrainedConfig = _checked(
        path,
        lambda: transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote
        ),
    )
    return config, remote


def _check_known(path: Path, raw: dict[str, Any], known: bool) -> None:
    version = transformers.__version__
    if not known and "auto_map" in raw:
        code = ", ".join(str(value) for value in raw["auto_map"].values())
        raise LoadError(
            f"{path} needs Python code from its own folder ({code}): "
            "read that code, then pass trust_remote_code=True"
        )
    if not known:
        raise LoadError(
            f"{path} has model_type {raw['model_type']!r}, which transformers {version} does not "
            "know: pip install --upgrade transformers, or correct the file"
        )
    architecture = raw["architectures"][0]
    if getattr(transformers, architecture, None) is None:
        raise LoadError(
            f"{path} names architecture {architecture!r}, which transformers {version} does not "
            "know: pip install --upgrade transformers, or correct the file"
        )


def _quantization(path: Path) -> Quantization | None:
    raw = read_json(path)
    text = raw.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    settings = raw.get("quantization_config", inner)
    return None if settings is None else read_quantization(path, settings)


def _fill_safetensors(
    folder: Path,
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    wanted: Callable[[str], torch.dtype],
    on_bytes: Callable[[int], None],
    quantization: Quantization | None,
) -> PreTrainedModel:
    entries = weight_entries(folder)
    packed = [] if quantization is None else find_weights(folder, entries, quantization)
    plain = plain_tensors(folder, entries, packed)
    needed = sum(math.prod(e.shape) * wanted(name).itemsize for name, e in plain.items())
    needed += sum(part.entry.nbytes for weight in packed for part in weight.parts.values())
    memory.require(needed, folder, str(dtype).removeprefix("torch."))
    files = {path: WeightFile(path, on_bytes) for path in {e.path for e in entries.values()}}

    def lazy(entry: Entry, wanted: torch.dtype) -> LazyTensor:
        file, offset, shape = files[entry.path], entry.offset, entry.shape
        return PlainTensor(file, offset=offset, shape=shape, stored=entry.dtype, wanted=wanted)

    try:
        weights = {name: lazy(entry, wanted(name)) for name, entry in plain.items()}
        if quantization is None:
            return fill(cls, config, weights, dtype, folder)
        model = skeleton(cls, config, dtype)
        layers = replacements(
            folder, model, packed, dtype, plain, lambda entry: lazy(entry, entry.dtype)[...]
        )
        weights |= {name: _source(source, lazy) for name, source in layers.sources.items()}
        settings = quantization_config(quantization.settings, layers)
        return fill(cls, config, weights, dtype, folder, settings)
    finally:
        for file in files.values():
            file.close()


def _source(source: Entry | Stack, lazy: Callable[[Entry, torch.dtype], LazyTensor]) -> LazyTensor:
    """A tensor that stays as it is stored, or several in one."""
    if isinstance(source, Entry):
        return lazy(source, source.dtype)
    return StackedTensor(
        [[lazy(entry, entry.dtype) for entry in expert] for expert in source.experts],
        dim=source.dim,
        sizes=source.sizes,
        shape=source.shape,
        dtype=source.dtype,
    )


def _pickled(
    folder: Path, allowed: bool, wanted: Callable[[str], torch.dtype]
) -> Mapping[str, LazyTensor]:
    if (folder / PICKLE_INDEX).is_file():
        paths = [folder / name for name in sorted(shards(folder / PICKLE_INDEX))]
    elif (folder / PICKLE).is_file():
        paths = [folder / PICKLE]
    else:
        raise LoadError(f"{folder} has no weights: expected {SINGLE}, or {INDEX} with its shards")
    if not allowed:
        raise LoadError(
            f"{folder} has only pickled weights ({paths[0].name}), which can run code when opened: "
            "convert them to safetensors, or pass allow_pickle=True if you trust their source"
        )
    weights: dict[str, LazyTensor] = {}
    for path in paths:
        for name, tensor in _unpickle(path).items():
            weights[name] = MappedTensor(tensor, wanted(name))
    return weights


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        # Mapped, so that only one tensor at a time is copied; the old format cannot be.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(
            f"{path} is no pickled state dict of plain tensors ({reason}): fetch it again or "
            "convert it to safetensors"
        ) from None
    if not isinstance(content, dict) or not all(torch.is_tensor(v) for v in content.values()):
        raise LoadError(f"{path} holds more than tensors: expected a plain state dict")
    return content


def _tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer: PreTrainedTokenizerBase = _checked(
        folder,
        lambda: transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        ),
    )
    return tokenizer


def _checked(path: Path, build: Callable[[], Any]) -> Any:
    """What `build` returns; whatever Transformers raises over a damaged file is one LoadError."""
    try:
        return build()
    except Exception as error:
        raise LoadError(f"Transformers cannot use {path}: {error}") from error
