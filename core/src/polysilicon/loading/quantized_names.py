"""Where the weights of a checkpoint stand in a model, by Transformers' own rules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from polysilicon.loading.quantized_tensors import Weight


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a weight stands in the model.

    Attributes:
        module: path of the module.
        parameter: name of its parameter that the weight is, or is a part of.
        expert: which of the experts that are stacked in it; None where it is all of it.
        part: which of the weights whose rows follow one another in an expert.
        parts: how many those are.
    """

    module: str
    parameter: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


class Names:
    """The places of a checkpoint's weights in `model`, which is on the meta device."""

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._known: dict[str, Any] = model.state_dict()

    def unused(self, weight: Weight) -> bool:
        """Whether the model leaves it in the checkpoint, e.g. DeepSeek-V3's last layer."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, weight.name) for pattern in patterns)

    def place(self, folder: Path, weight: Weight) -> Place:
        """Where a weight stands.

        Raises:
            LoadError: nowhere, or it is put together in a way that packed weights can't be.
        """
        renamed: str
        renamed, pattern = rename_source_key(
            weight.name,
            self._renamings,
            self._converters,
            self._model.base_model_prefix,
            self._known,
        )
        module, _, parameter = renamed.rpartition(".")
        stacked = renamed in self._known and self._known[renamed].dim() == 3
        linear = renamed in self._known and isinstance(self._model.get_submodule(module), nn.Linear)
        if pattern is None and (stacked or linear):
            return Place(module=module, parameter=parameter)
        if pattern is None or not stacked:
            raise LoadError(
                f"{folder}: {weight.name} is stored quantised ({weight.stored}) and "
                f"{type(self._model).__name__} has no linear layer or experts there: the "
                "checkpoint is of another model, or of a kind that is not loaded"
            )
        converter = next(rule for rule in self._converters if pattern in rule.source_patterns)
        steps = tuple(type(step) for step in converter.operations)
        if steps not in _STACKING:
            raise LoadError(
                f"{folder}: Transformers makes {renamed} of {weight.name} by "
                f"{', '.join(step.__name__ for step in steps)}, which packed weights can't be put "
                "through: use an unquantised checkpoint"
            )
        numbers = [word for word in weight.name.split(".") if word.isdigit()]
        return Place(
            module=module,
            parameter=parameter,
            expert=int(numbers[-1]),
            part=converter.source_patterns.index(pattern),
            parts=len(converter.source_patterns),
        )


#: What Transformers does to stack experts: joins gate and up, and may store both transposed, which
#: packed weights have their own order for.
_STACKING = (
    (MergeModulelist,),
    (MergeModulelist, Concatenate),
    (MergeModulelist, Transpose),
    (MergeModulelist, Concatenate, Transpose),
)
