"""Loads a GGUF file as an ordinary dense model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from polysilicon.loading import gguf_config, gguf_weights, memory
from polysilicon.loading.assemble import fill, model_class, skeleton
from polysilicon.loading.gguf_header import read_header
from polysilicon.loading.lazy import WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from polysilicon.loading.gguf_header import GgufHeader


def load_gguf(
    path: Path, dtype: torch.dtype, on_bytes: Callable[[int], None]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model in `dtype` and the tokenizer of a GGUF file.

    Raises:
        LoadError: the file is damaged, of an unsupported architecture, or does not fit in memory.
    """
    header = read_header(path)
    values = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    memory.require(values * dtype.itemsize, path, str(dtype).removeprefix("torch."))
    file = WeightFile(path, on_bytes)
    try:
        config = gguf_config.build_config(header, gguf_weights.rope_factors(header, file))
        cls = model_class(config, path)
        weights = gguf_weights.state_dict(header, file, skeleton(cls, config, dtype), dtype)
        model = fill(cls, config, weights, dtype, path)
    finally:
        file.close()
    _set_stop_ids(model, header)
    return model, gguf_config.build_tokenizer(header)


def _set_stop_ids(model: PreTrainedModel, header: GgufHeader) -> None:
    # Chat models end a turn with another token than a text.
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    stop = list(dict.fromkeys(i for i in ids if i is not None))
    if stop and model.generation_config is not None:
        model.generation_config.eos_token_id = stop if len(stop) > 1 else stop[0]
