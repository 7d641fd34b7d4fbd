"""Our layers in the place of a model's own, one for each quantised weight of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polysilicon.adapt.surgery import copy_plain_attributes
from polysilicon.errors import LoadError
from polysilicon.layers.quantized_linear import QuantizedLinear
from polysilicon.loading.experts_form import QuantizedExpertsLike, experts_form
from polysilicon.loading.quantized_names import Names, Place
from polysilicon.loading.quantized_stacks import Stack, check_shapes, stack, stacked_format

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path

    from transformers import PreTrainedModel

    from polysilicon.adapt.experts import ExpertsLike
    from polysilicon.layers.quantized_weight import QuantizedLayer
    from polysilicon.loading.quantized_tensors import Weight
    from polysilicon.loading.safetensors_folder import Entry
    from polysilicon.records import Format

    Read = Callable[[Entry], torch.Tensor]


@dataclass
class Replacements:
    """Layers on the meta device, and where their tensors lie.

    Attributes:
        layers: path of the module that it stands for → layer.
        sources: name in the model → the tensor, or those that become it.
    """

    layers: dict[str, QuantizedLayer] = field(default_factory=dict)
    sources: dict[str, Entry | Stack] = field(default_factory=dict)

    def put_into(self, model: nn.Module) -> None:
        """Puts every layer where it belongs."""
        for path, layer in self.layers.items():
            copy_plain_attributes(model.get_submodule(path), layer)
            model.set_submodule(path, layer)

    def loaded(self) -> None:
        """To be called when the layers have their tensors, whose values may decide something."""
        for layer in self.layers.values():
            layer.look()

    @property
    def stacked(self) -> bool:
        """Whether tensors of the checkpoint were put together."""
        return any(isinstance(source, Stack) for source in self.sources.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacements:
        # Transformers copies configs, and with them what they hold.
        return self


def replacements(
    folder: Path,
    model: PreTrainedModel,
    weights: list[Weight],
    dtype: torch.dtype,
    plain: Container[str],
    read: Read,
) -> Replacements:
    """The layers for `weights` of a checkpoint of `model`, which is on the meta device.

    `plain` has the names of its other tensors; `read` gives the values of those few tensors on
    which it depends whether a layer can be made.

    Raises:
        LoadError: a weight has no place in the model, or does not fit there.
    """
    found, names = Replacements(), Names(model)
    experts: dict[str, dict[str, list[tuple[Place, Weight]]]] = {}
    for weight in weights:
        if names.unused(weight):
            continue
        place = names.place(folder, weight)
        module = model.get_submodule(place.module)
        if isinstance(module, nn.Linear):
            bias = module.bias
            if bias is None and f"{weight.name.removesuffix('weight')}bias" in plain:
                # Early GPTQ checkpoints have one for every layer, of a model that has none.
                empty = torch.empty(module.out_features, dtype=dtype, device="meta")
                bias = nn.Parameter(empty, requires_grad=False)
            layer = _linear(folder, weight, module, bias, dtype)
            parts = weight.parts.values()
            found.layers[place.module] = layer
            found.sources |= {f"{place.module}.{part.name}": part.entry for part in parts}
        else:
            stacks = experts.setdefault(place.module, {})
            stacks.setdefault(place.parameter, []).append((place, weight))
    forms: dict[Any, ExpertsLike] = {}
    for path, products in experts.items():
        module = model.get_submodule(path)
        kind = (type(module), *(tuple(p.shape) for p in module.parameters(recurse=False)))
        if kind not in forms:
            forms[kind] = experts_form(path, module)
        mixture = _Mixture(folder, path, module, forms[kind], read)
        found.layers[path], sources = mixture.layer(products, dtype)
        found.sources |= {f"{path}.{name}": source for name, source in sources.items()}
    return found


def _linear(
    folder: Path,
    weight: Weight,
    module: nn.Linear,
    bias: nn.Parameter | None,
    dtype: torch.dtype,
) -> QuantizedLinear:
    tensors = {part.name: _empty(part.entry) for part in weight.parts.values()}
    try:
        layer = QuantizedLinear(
            tensors,
            weight.stored,
            bias=bias,
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


def _empty(entry: Entry | Stack) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


@dataclass(frozen=True)
class _Mixture:
    """One module's experts: what they compute, and how their tensors come together."""

    folder: Path
    path: str
    module: nn.Module
    form: ExpertsLike
    read: Read

    def layer(
        self, products: dict[str, list[tuple[Place, Weight]]], dtype: torch.dtype
    ) -> tuple[QuantizedLayer, dict[str, Entry | Stack]]:
        """The layer, and its tensors; `products` lists the weights of each parameter."""
        form = self.form
        up, down, *biases = form.names
        if products.keys() != {up, down}:
            raise LoadError(
                f"{self.folder}: of {self.path} only {', '.join(products)} is stored quantised: "
                f"expected {up} and {down}"
            )
        weights = [weight for listed in products.values() for _, weight in listed]
        stored = stacked_format(self.folder, weights)
        made = {name: self._product(name, listed, stored) for name, listed in products.items()}
        sources = {name: source for parts in made.values() for name, source in parts.values()}
        names = {key: {arg: name for arg, (name, _) in made[key].items()} for key in made}
        tensors = {name: _empty(source) for name, source in sources.items()}
        own = dict(self.module.named_parameters(recurse=False))
        _, rows, columns = own[down].shape
        try:
            layer = QuantizedExpertsLike(
                tensors | {name: own[name] for name in biases if name in own},
                stored,
                up=names[up],
                down=names[down],
                biases=(biases[0], biases[1]),
                activation=form.activation,
                input_format=weights[0].activation,
                gated=form.gated,
                interleaved=form.interleaved,
                alpha=form.alpha,
                limit=form.limit,
                in_features=(columns, rows) if form.transposed else (rows, columns),
                dtype=dtype,
                arguments=form.arguments,
                places=form.places,
            )
        except (TypeError, ValueError) as error:
            raise LoadError(f"{self.folder}: {self.path}: {error}") from None
        return layer, sources

    def _product(
        self, parameter: str, listed: list[tuple[Place, Weight]], stored: Format
    ) -> dict[str, tuple[str, Entry | Stack]]:
        """Argument → (name in the layer, where it lies) of one of the two products."""
        place, weight = listed[0]
        if place.expert is None:
            return {arg: (part.name, part.entry) for arg, part in weight.parts.items()}
        count = self.module.get_parameter(parameter).shape[0]
        placed = {(place.expert, place.part): weight for place, weight in listed}
        wanted = [(expert, part) for expert in range(count) for part in range(place.parts)]
        if sorted(placed) != wanted or len(listed) != len(wanted):
            raise LoadError(
                f"{self.folder}: {len(listed)} quantised weights make {self.path}.{parameter}, "
                f"expected {place.parts} of each of {count} experts: the checkpoint is incomplete"
            )
        experts = [[placed[e, part] for part in range(place.parts)] for e in range(count)]
        check_shapes(self.folder, experts)
        made = stack(self.folder, parameter, stored, experts, self.read)
        return {arg: (f"{parameter}_{part.name}", source) for arg, (part, source) in made.items()}
