"""The shapes of a model's layers from its config alone, on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from polysilicon.loading.assemble import model_class, skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Role = Literal["linear", "embedding", "norm", "attention"]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One kind of layer: what it is, its sizes, and which modules of the model have them.

    Attributes:
        role: `linear` (out, in), `embedding` (rows, width), `norm` (width,) or
            `attention` (query heads, key heads, head size).
        shape: the sizes, as `role` says.
        modules: names of the modules with this shape, in the model's order.
    """

    role: Role
    shape: tuple[int, ...]
    modules: tuple[str, ...]


def model_shapes(config: PreTrainedConfig) -> tuple[LayerShape, ...]:
    """Every distinct linear, embedding, norm and attention shape of a causal LM.

    Args:
        config: a Transformers config; no weights are read or allocated.

    Raises:
        LoadError: the config is not one of a causal LM.
    """
    model = skeleton(
        model_class(config, Path(config.name_or_path or config.model_type)), config, torch.float32
    )
    text = config.get_text_config()
    found: dict[tuple[Role, tuple[int, ...]], list[str]] = {}
    for name, module in model.named_modules():
        for role, shape in _shapes(module, text):
            found.setdefault((role, shape), []).append(name)
    return tuple(
        LayerShape(role=role, shape=shape, modules=tuple(names))
        for (role, shape), names in found.items()
    )


def _shapes(module: nn.Module, config: PreTrainedConfig) -> list[tuple[Role, tuple[int, ...]]]:
    if isinstance(module, nn.Linear):
        return [("linear", (module.out_features, module.in_features))]
    if isinstance(module, nn.Embedding):
        return [("embedding", (module.num_embeddings, module.embedding_dim))]
    own = list(module.parameters(recurse=False))
    if not list(module.children()):
        weight = getattr(module, "weight", None)
        is_norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and len(own) <= 2
        return [("norm", tuple(weight.shape))] if is_norm and weight is not None else []
    return _attention(module, config)


def _attention(module: nn.Module, config: PreTrainedConfig) -> list[tuple[Role, tuple[int, ...]]]:
    # Transformers' attention modules are the ones that know their layer and their head size.
    head = getattr(module, "head_dim", None)
    if head is None or getattr(module, "layer_idx", None) is None:
        return []
    heads = config.num_attention_heads
    groups = getattr(module, "num_key_value_groups", None)
    keys = heads // groups if groups else getattr(config, "num_key_value_heads", heads)
    return [("attention", (heads, keys, head))]
