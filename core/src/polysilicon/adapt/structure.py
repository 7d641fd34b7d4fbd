"""What a module looks like from outside: the facts from which hypotheses are formed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from polysilicon.adapt.probe import Inputs
    from polysilicon.adapt.recording import ModuleCall
    from polysilicon.adapt.report import Kind


@dataclass(frozen=True)
class Candidate:
    """One module with where it stands and how the model called it.

    Attributes:
        path: dotted name.
        module: the module itself.
        call: the first recorded call, None where the probe prompt did not reach it.
        dtype: dtype of the activations that reach it.
    """

    path: str
    module: nn.Module
    call: ModuleCall | None
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Class name: a label for the report, never a reason to replace."""
        return type(self.module).__name__


def first_tensor(call: ModuleCall | Inputs | None) -> Tensor | None:
    """The first tensor that a recorded call was given."""
    if call is None:
        return None
    values = (*call.args, *call.kwargs.values())
    return next((value for value in values if isinstance(value, Tensor)), None)


def is_leaf(module: nn.Module) -> bool:
    """Has no children, so that its own code is all there is."""
    return not any(True for _ in module.children())


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters."""
    return {name: value for name, value in module._parameters.items() if value is not None}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """The module's own buffers."""
    return {name: value for name, value in module._buffers.items() if value is not None}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers."""
    return {**parameters(module), **buffers(module)}


def numbers(module: nn.Module) -> list[float]:
    """Plain numbers among the attributes, and the values of one-element buffers."""
    found = [
        float(value)
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "training"
    ]
    found += [float(value.item()) for value in buffers(module).values() if value.numel() == 1]
    return list(dict.fromkeys(found))


def small_numbers(module: nn.Module) -> list[float]:
    """Attributes that may be an epsilon, then the usual ones where the code has them inline."""
    own = [value for value in numbers(module) if 0 < value < 1e-2]
    usual = [1e-6, 1e-5, torch.finfo(torch.float32).eps, 1e-8, 1e-12]
    return list(dict.fromkeys(own + usual))


def required_arguments(module: nn.Module) -> int:
    """How many arguments `forward` needs, apart from itself."""
    try:
        parameters_ = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters_)


def is_stranded(module: nn.Module) -> bool:
    """Holds weights on the meta device that no hook of accelerate brings in for a forward."""
    return not hasattr(module, "_hf_hook") and any(p.is_meta for p in parameters(module).values())


def obstacle(module: nn.Module) -> str:
    """Why a module must not be touched whatever it computes; empty when it may be."""
    if hasattr(module, "_hf_hook"):
        return "offloaded or dispatched by accelerate"
    values: list[Any] = [*parameters(module).values(), *buffers(module).values()]
    if any(value.is_meta for value in values):
        return "its weights are on the meta device"
    if any(hasattr(value, "device_mesh") for value in values):
        return "its weights are sharded over devices"
    if any(type(value) not in (Tensor, nn.Parameter, nn.Buffer) for value in values):
        return f"its weights are of a tensor subclass ({type(values[0]).__name__})"
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks):
        return "hooks are registered on it"
    return ""


#: Words in class names from which a kept module gets its label in the report.
_WORDS: tuple[tuple[str, Kind], ...] = (
    ("norm", "norm"),
    ("rotary", "rotary"),
    ("mamba", "mixer"),
    ("mixer", "mixer"),
    ("deltanet", "mixer"),
    ("conv", "mixer"),
    ("lru", "mixer"),
    ("lstm", "mixer"),
    ("expert", "experts"),
    ("router", "experts"),
    ("activation", "activation"),
    ("attention", "attention"),
    ("embed", "embedding"),
    ("linear", "linear"),
    ("moe", "experts"),
)


def label(candidate: Candidate) -> Kind:
    """What a module that stays is listed as; experts by three-dim weights, routers by choosing."""
    own = parameters(candidate.module)
    chooses = candidate.call is not None and isinstance(candidate.call.output, tuple)
    name = candidate.name.lower()
    named: Kind = next((kind for word, kind in _WORDS if word in name), "other")
    stacked = any(value.dim() == 3 for value in own.values())
    if named != "mixer" and (stacked or ("weight" in own and chooses)):
        return "experts"
    return named
