"""adapt(): walks a model, replaces what is proved, reports the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from polysilicon.adapt import attending, mixers, proof, replacing
from polysilicon.adapt.probe import undisturbed
from polysilicon.adapt.recording import runnable
from polysilicon.adapt.refusals import refuse
from polysilicon.adapt.report import Report
from polysilicon.adapt.structure import is_stranded
from polysilicon.adapt.work import Work
from polysilicon.errors import AdaptError
from polysilicon.layers.base import Layer
from polysilicon.layers.quantized_weight import unrounded

if TYPE_CHECKING:
    from torch import Tensor

    from polysilicon.adapt.surgery import Surgery
    from polysilicon.layers.attention import Attention, PagedContext
    from polysilicon.layers.latent_attention import LatentAttention
    from polysilicon.layers.recurrent import Recurrent

_MARK = "_polysilicon_adapted"


@dataclass
class Adapted:
    """A model whose modules are ours where that was proved.

    Attributes:
        model: the object that was passed in; its code is still Transformers'.
        report: what was replaced, and what stayed and why.
        context: the engine's step, shared by all attention and recurrent layers.
        attention: the attention layers in the order of the model.
        recurrent: the layers with a state a sequence, in the order of the model.
    """

    model: nn.Module
    report: Report
    context: PagedContext
    attention: list[Attention | LatentAttention]
    recurrent: list[Recurrent]
    _surgery: Surgery = field(repr=False)

    def undo(self) -> None:
        """Puts the model's own modules back; weights stay where they are, shared by both.

        Weights that `prepare()` packed are plain again, one layer at a time.
        """
        for module in self.model.modules():
            if isinstance(module, Layer):
                module.unpack()
        self._surgery.undo()


def adapt(model: nn.Module, *, device: str | None = None) -> Adapted:
    """Replaces the modules of a Transformers model by ours, each after proof on probe inputs.

    The model is changed in place and left in eval mode; its parameters, their names and their
    ties stay. What could not be proved stays as it was and is listed in the report.

    Args:
        model: any causal language model of Transformers, with its weights loaded.
        device: torch device that the model must be on; None takes it where it lies.

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
        raise AdaptError(
            "the model is adapted already: call undo() on the first result to redo it, or give "
            "that result to Engine()"
        )
    if device is not None:
        _check_device(model, device)
    model.eval()
    with undisturbed(model), unrounded(model):
        work = Work(model)
        work.surgery.set_attribute(model, _MARK, True)
        try:
            _run(work)
        except BaseException:
            work.surgery.undo()
            raise
    attention = [work.attention[path] for path in work.modules if path in work.attention]
    recurrent = list(work.recurrent.values())
    return Adapted(model, _report(work), work.context, attention, recurrent, work.surgery)


def _check_device(model: nn.Module, device: str) -> None:
    wanted = torch.device(device).type
    found = {p.device.type for p in model.parameters()} - {"meta"}
    if found and found != {wanted}:
        raise AdaptError(
            f"the model lies on {', '.join(sorted(found))}, adapt() was asked for {device!r}: "
            f"call model.to({device!r}) first, or pass the device that it lies on"
        )


def _run(work: Work) -> None:
    expected, failure = _expected(work)
    bound = proof.model_bound(work.dtype, len(work.modules) // 8 + 1)
    if expected:
        moved = proof.sensitivity(work.model, work.scenarios, expected, work.dtype)
        bound = max(bound, 2 * moved)
    attention = attending.Attending(work) if expected else None
    if attention is not None:
        attention.record()
    replacing.list_ours(work)
    replacing.replace_leaves(work)
    replacing.replace_experts(work)
    replacing.replace_mlps(work)
    if attention is None:
        work.paged = f"the probe prompt did not run: {failure}"
        if getattr(work.model.config, "is_encoder_decoder", False):
            work.paged = "it is an encoder-decoder, which needs a source text besides the prompt"
        attending.list_attention(work, lambda path, module: work.paged)
        replacing.list_rest(work)
        return
    mixers.replace_mixers(work)
    mark = work.surgery.mark
    attention.replace()
    replacing.list_rest(work)
    _prove(work, attention, expected, bound, mark)


def _expected(work: Work) -> tuple[list[Tensor], str]:
    """Logits of the untouched model, empty with the reason where the probe prompt fails."""
    if any(is_stranded(module) for module in work.model.modules()):
        return [], "weights are on the meta device"
    # From here on the mark alone stays when everything else is taken back.
    work.start = work.surgery.mark
    work.scenarios, expected, failure = runnable(work.model)
    # A model may exchange its modules at the first prompt, as BigBird does at a short one.
    work.look()
    return expected, failure


def _prove(
    work: Work,
    attention: attending.Attending,
    expected: list[Tensor],
    bound: float,
    mark: int,
) -> None:
    """Whole-model check; takes back the attention, then everything, until the logits agree."""
    failure = proof.check_model(work.model, work.scenarios, expected, work.dtype, bound)
    if failure:
        attention.take_back(mark, failure)
        failure = proof.check_model(work.model, work.scenarios, expected, work.dtype, bound)
    if failure:
        work.keep_all(f"proved alone, but {failure}")
    if not work.attention and not work.recurrent:
        known = any(row.kind == "attention" for row in work.rows.values())
        why = "none of its attention could be adapted" if known else "it has no attention"
        work.paged = work.paged or f"{why} (the report says why of each module)"
    if not work.paged:
        work.paged = proof.check_paged(work, bound)


def _report(work: Work) -> Report:
    order = {path: index for index, path in enumerate(work.modules)}
    rows = sorted(work.rows.values(), key=lambda row: (order[row.module], row.path))
    return Report(
        architecture=type(work.model).__name__,
        dtype=str(work.dtype).removeprefix("torch."),
        rows=tuple(rows),
        paged=work.paged or None,
    )
