"""adapt(): walks a model, replaces what is proved, reports the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polysilicon.adapt import activations, attending, linears, mlps, norms, proof, rotary
from polysilicon.adapt.interface import Interface
from polysilicon.adapt.probe import Unverified, undisturbed
from polysilicon.adapt.recording import Recording, record, run_probe
from polysilicon.adapt.refusals import refuse
from polysilicon.adapt.report import Kind, Report, Row
from polysilicon.adapt.structure import Candidate, is_leaf, label, obstacle, parameters
from polysilicon.adapt.surgery import Surgery
from polysilicon.errors import AdaptError
from polysilicon.layers.attention import Attention, PagedContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from polysilicon.layers.base import Layer

    Recogniser = Callable[[Candidate], tuple[Layer, float]]

_MARK = "_polysilicon_adapted"


@dataclass
class Adapted:
    """A model whose modules are ours where that was proved.

    Attributes:
        model: the object that was passed in; its code is still Transformers'.
        report: what was replaced, and what stayed and why.
        context: the engine's step, shared by all attention layers.
        attention: the attention layers in the order of the model.
    """

    model: nn.Module
    report: Report
    context: PagedContext
    attention: list[Attention]
    _surgery: Surgery = field(repr=False)

    def undo(self) -> None:
        """Puts the model's own modules back; weights stay where they are, shared by both."""
        self._surgery.undo()


def adapt(model: nn.Module, *, device: str = "cpu") -> Adapted:
    """Replaces the modules of a Transformers model by ours, each after proof on probe inputs.

    The model is changed in place and left in eval mode; its parameters, their names and their
    ties stay. What could not be proved stays as it was and is listed in the report.

    Args:
        model: any causal language model of Transformers, with its weights loaded.
        device: torch device that the model must be on.

    Returns:
        The model with its report; `undo()` takes everything back.

    Raises:
        AdaptError: the model is adapted already, or is of a kind that is refused by name.

    Example:
        adapted = polysilicon.adapt(model)
        print(adapted.report.summary())
        adapted.undo()
    """
    refuse(model)
    if _MARK in vars(model):
        raise AdaptError("the model is adapted already: call undo() on the first result to redo it")
    _check_device(model, device)
    model.eval()
    with undisturbed(model):
        return _Adaptation(model).run()


def _check_device(model: nn.Module, device: str) -> None:
    wanted = torch.device(device).type
    found = {p.device.type for p in model.parameters()} - {"meta"}
    if found and found != {wanted}:
        raise AdaptError(
            f"the model lies on {', '.join(sorted(found))}, adapt() was asked for {device!r}: "
            f"call model.to({device!r}) first, or pass the device that it lies on"
        )


class _Adaptation:
    """One run of adapt(): the model, what was recorded of it, the changes and the rows so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.surgery = Surgery()
        self.context = PagedContext()
        self.recording = Recording()
        self.rows: dict[str, Row] = {}
        self.dtype = next(
            (p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32
        )
        self.attention: list[Attention] = []
        self.paged = ""

    def run(self) -> Adapted:
        self.surgery.set_attribute(self.model, _MARK, True)
        expected = self._expected()
        interface = self._record() if expected else None
        self._replace_leaves()
        self._replace_mlps()
        leaves = self.surgery.mark
        if interface is not None:
            self._replace_attention(interface)
        if expected:
            proof.whole_model(self, expected, leaves)
        self._list_attention_left()
        return Adapted(self.model, self._report(), self.context, self.attention, self.surgery)
