"""Attention modules that compute attention in their own code, without Transformers' interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from polysilicon.adapt import fusing, structure
from polysilicon.adapt.attention import check_mask
from polysilicon.adapt.interface import CHILD
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.recording import place
from polysilicon.layers.attention import Attention
from polysilicon.layers.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from polysilicon.adapt.recording import ModuleCall
    from polysilicon.adapt.work import Work


def attend(work: Work, path: str, module: nn.Module) -> tuple[Attention, float, Tensor]:
    """Gives the module the one-piece forward; returns the layer, the error and the mask it saw.

    The number of heads and the scale are guessed from the numbers that the module holds, and
    proved against its own forward.

    Raises:
        Unverified: it was not called, its mask is not causal, or no guess reproduces it.
    """
    calls = work.recording.calls.get(module)
    if not calls or structure.obstacle(module):
        raise Unverified("the probe prompts did not reach it, or it must not be touched")
    mask = _mask(work, calls[0])
    reason = "its projections are not those of attention"
    for layer in _guesses(work, path, module, calls[0]):
        if check_mask(layer, mask, work.recording):
            raise Unverified("its mask is not plainly causal")
        try:
            error = fusing.fuse(module, layer, work.recording, work.surgery)
        except Unverified as failure:
            reason = str(failure)
            continue
        work.surgery.attach(module, CHILD, layer)
        return layer, error, mask
    raise Unverified(reason)


def _mask(work: Work, seen: ModuleCall) -> Tensor:
    """The mask among the arguments that Transformers' mask functions built."""
    values: tuple[Any, ...] = (*seen.args, *seen.kwargs.values())
    for value in values:
        if isinstance(value, Tensor) and place(value) in work.recording.masks:
            return value
    raise Unverified("it was given no mask of Transformers' mask functions")


def _guesses(work: Work, path: str, module: nn.Module, seen: ModuleCall) -> Iterator[Attention]:
    hidden = structure.first_tensor(seen)
    widths = [
        ours.out_features
        for child, inner in seen.children
        if structure.first_tensor(inner) is hidden
        and isinstance(ours := work.surgery.replacements.get(child), Linear)
    ]
    if len(widths) != 3:
        return
    numbers = structure.numbers(module)
    counts = [int(n) for n in numbers if n >= 1 and n == int(n) and widths[0] % int(n) == 0]
    for heads in dict.fromkeys(counts):
        size = widths[0] // heads
        if widths[1] % size or widths[2] != widths[1] or heads % (widths[1] // size):
            continue
        scales = dict.fromkeys([size**-0.5, *(n for n in numbers if 0 < n <= 1), 1.0])
        for scale in scales:
            yield Attention(
                heads,
                widths[1] // size,
                size,
                scale=scale,
                name=path,
                dtype=work.dtype,
                context=work.context,
            )
