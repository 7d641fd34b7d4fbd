"""Our layers in the place of a model's own, one for each quantised weight of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from polysilicon.errors import LoadError
from polysilicon.layers.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from polysilicon.layers.quantized_weight import QuantizedLayer
    from polysilicon.loading.quantized_tensors import Weight
    from polysilicon.loading.safetensors_folder import Entry

#: Name in the model → where the tensor lies.
Sources = dict[str, "Entry"]


class Replacements:
    """Layers on the meta device, by the path of the module that each stands for."""

    def __init__(self) -> None:
        self.layers: dict[str, QuantizedLayer] = {}
        #: name in the model → where the tensor lies
        self.sources: Sources = {}

    def put_into(self, model: nn.Module) -> None:
        """Puts every layer where it belongs."""
        for path, layer in self.layers.items():
            model.set_submodule(path, layer)

    def loaded(self) -> None:
        """To be called when the layers have their tensors, whose values may decide something."""
        for layer in self.layers.values():
            layer.look()

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacements:
        # Transformers copies configs, and with them what they hold.
        return self


def replacements(
    folder: Path, model: PreTrainedModel, weights: list[Weight], dtype: torch.dtype
) -> Replacements:
    """The layers for `weights` of a checkpoint of `model`, which is on the meta device.

    Raises:
        LoadError: a weight has no place in the model, or does not fit there.
    """
    found = Replacements()
    names = _Names(model)
    for weight in weights:
        path = names.module(f"{weight.name}.weight")
        module = None if path is None else model.get_submodule(path)
        if path is None or not isinstance(module, nn.Linear):
            raise LoadError(
                f"{folder}: {weight.name} is stored quantised ({weight.stored}) and "
                f"{type(model).__name__} has no linear layer there: the checkpoint is of another "
                "model, or of a kind that is not loaded"
            )
        found.layers[path] = _linear(folder, weight, module, dtype)
        found.sources |= {f"{path}.{name}": entry for name, entry in weight.parts.values()}
    return found


class _Names:
    """The names that a checkpoint's weights have in the model, by Transformers' own rules."""

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._known: dict[str, Any] = model.state_dict()

    def module(self, name: str) -> str | None:
        """The module whose weight the checkpoint calls `name`; None where there is none."""
        renamed: str
        renamed, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        if pattern is not None or renamed not in self._known:
            return None
        return renamed.removesuffix(".weight")


def _linear(folder: Path, weight: Weight, module: nn.Linear, dtype: torch.dtype) -> QuantizedLinear:
    tensors = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in weight.parts.values()
    }
    try:
        layer = QuantizedLinear(
            tensors,
            weight.stored,
            bias=module.bias,
            activation=weight.activation,
            in_features=module.in_features,
            dtype=dtype,
        )
    except (TypeError, ValueError) as error:
        raise LoadError(f"{folder}: {weight.name}: {error}") from None
    if layer.out_features != module.out_features:
        raise LoadError(
            f"{folder}: {weight.name} gives {layer.out_features} numbers and the model needs "
            f"{module.out_features}: config and weights are of different models"
        )
    return layer
