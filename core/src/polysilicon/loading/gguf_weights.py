"""A GGUF file's tensors under Transformers' names, dequantised when they are asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, dequantize, get_tensor_name_map

from polysilicon.errors import LoadError
from polysilicon.loading.lazy import QuantizedTensor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from polysilicon.loading.gguf_header import GgufHeader, GgufTensor
    from polysilicon.loading.lazy import Convert, LazyTensor, WeightFile

#: Tensors that are part of the rope configuration, not of the state dict.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def rope_factors(header: GgufHeader, file: WeightFile) -> dict[str, list[float]]:
    """The values of the file's rope tensors, by name."""
    factors = {}
    for name in ROPE_TENSORS:
        if name in header.tensors:
            tensor = header.tensors[name]
            raw = np.empty((1, tensor.file_bytes), dtype=np.uint8)
            file.read_into(raw.reshape(-1), tensor.offset)
            factors[name] = [float(v) for v in _values(tensor)(raw).reshape(-1)]
    return factors


def state_dict(
    header: GgufHeader,
    file: WeightFile,
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
) -> dict[str, LazyTensor]:
    """Parameter name → lazy tensor, for a model built on the meta device.

    Raises:
        LoadError: the file has a tensor that the model has no place for.
    """
    names = _names(header.architecture, skeleton)
    unknown = [name for name in header.tensors if name not in names and name not in ROPE_TENSORS]
    if unknown:
        raise LoadError(
            f"{header.path} has {len(unknown)} tensors that {type(skeleton).__name__} has no place "
            f"for ({', '.join(unknown[:3])}): load the model's Hugging Face folder instead"
        )
    return {
        names[tensor.name]: QuantizedTensor(
            file,
            offset=tensor.offset,
            file_bytes=tensor.file_bytes,
            shape=tensor.shape,
            dequantize=_values(tensor),
            wanted=dtype,
            rearrange=_rearrangement(header.architecture, skeleton.config, tensor.name),
        )
        for tensor in header.tensors.values()
        if tensor.name not in ROPE_TENSORS
    }


def _names(architecture: str, skeleton: PreTrainedModel) -> dict[str, str]:
    """GGUF tensor name → parameter name, from the `gguf` package's own table."""
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, skeleton.config.num_hidden_layers)
    names = {}
    for parameter in skeleton.state_dict():
        module, _, leaf = parameter.rpartition(".")
        if (found := table.get_name(module)) is not None:
            names[f"{found}.{leaf}"] = parameter
    return names


def _values(tensor: GgufTensor) -> Convert:
    return functools.partial(dequantize, qtype=GGMLQuantizationType(tensor.kind))


def _rearrangement(architecture: str, config: PreTrainedConfig, name: str) -> Convert | None:
    """How llama.cpp's converter changed the values of a tensor, undone; None where it did not."""
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return _minus_one
    if architecture == "llama" and ".attn_q." in name:
        return functools.partial(_split_halves, heads=config.num_attention_heads)
    if architecture == "llama" and ".attn_k." in name:
        return functools.partial(_split_halves, heads=config.num_key_value_heads)
    return None


def _minus_one(weight: np.ndarray) -> np.ndarray:
    # llama.cpp folds Gemma's 1 + w into the stored weight.
    return weight - np.float32(1)


def _split_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    # llama.cpp rotates neighbouring rows, Transformers the two halves of a head.
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
