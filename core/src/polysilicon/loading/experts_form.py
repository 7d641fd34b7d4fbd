"""What a model's experts compute, found on a small twin of them by adapt()'s own probes.

A checkpoint with packed experts has no dense weights to probe. The model's module has the code and
the config's numbers: with a few random experts it is a whole one, and recognised as any other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from polysilicon.adapt.experts import ExpertsLike, may_be_experts, recognise_experts, reordered
from polysilicon.adapt.probe import Unverified, undisturbed
from polysilicon.adapt.recording import ModuleCall
from polysilicon.adapt.structure import Candidate
from polysilicon.errors import LoadError
from polysilicon.layers.quantized_experts import QuantizedExperts

#: Experts of a twin, those of a token, and tokens of its first call.
_FEW, _TOP, _TOKENS = 2, 2, 3


class QuantizedExpertsLike(QuantizedExperts):
    """Quantised experts that take their arguments in the order and by the names of a model's own.

    Args:
        arguments, places: see `adapt.experts.ExpertsLike`.
        settings: see QuantizedExperts.
    """

    def __init__(
        self, *args: Any, arguments: tuple[str, ...], places: tuple[int, int, int], **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.arguments, self.places = arguments, places

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """[T, H], int64 [T, k] and [T, k] in the model's order → [T, H]."""
        return super().forward(*reordered(self.arguments, self.places, args, kwargs))


def experts_form(path: str, module: nn.Module) -> ExpertsLike:
    """Our layer with the weights of a twin of `module`, which is on the meta device.

    Raises:
        LoadError: no form of experts that we know reproduces it.
    """
    twin = _twin(module)
    reason = "it takes no tokens, chosen experts and weights"
    with undisturbed(twin):
        for seen in _calls(twin):
            candidate = Candidate(path, twin, seen, torch.float32)
            if not may_be_experts(candidate):
                continue
            try:
                layer, _ = recognise_experts(candidate)
            except Unverified as failure:
                reason = str(failure)
                continue
            assert isinstance(layer, ExpertsLike)
            return layer
    raise LoadError(
        f"{path} ({type(module).__name__}) has quantised weights and computes nothing that our "
        f"layer of quantised experts does: {reason}; use an unquantised checkpoint"
    )


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    source = torch.Generator().manual_seed(0)
    for name, stack in module.named_parameters(recurse=False):
        values = torch.randn(_FEW, *stack.shape[1:], generator=source) * stack.shape[-1] ** -0.5
        twin.register_parameter(name, nn.Parameter(values, requires_grad=False))
    for name, value in vars(module).items():
        # The number of experts, under whatever name.
        if name.startswith("num") and value == next(module.parameters()).shape[0]:
            setattr(twin, name, _FEW)
    return twin.eval()


def _calls(twin: nn.Module) -> list[ModuleCall]:
    """Calls with either order of chosen experts and weights that the twin answers."""
    stacks = [stack for stack in twin.parameters(recurse=False) if stack.dim() == 3]
    found = []
    for hidden in dict.fromkeys(size for stack in stacks for size in stack.shape[1:]):
        x = torch.ones(_TOKENS, hidden)
        indices = torch.arange(_TOP).repeat(_TOKENS, 1)
        weights = torch.full((_TOKENS, _TOP), 1 / _TOP)
        for args in ((x, indices, weights), (x, weights, indices)):
            try:
                output = twin(*args)
            # Foreign code on made-up arguments: whatever it raises means "not these".
            except Exception:
                continue
            found.append(ModuleCall(args, {}, output))
    return found
