"""All stand-ins for the functions of recurrent mixers, and which of them a function asks for."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from polysilicon.adapt.standins_convolution import ConvolvePrompt, ConvolveStep
from polysilicon.adapt.standins_delta import CorrectPrompt, CorrectStep
from polysilicon.adapt.standins_scan import ScanPrompt, ScanStep, SelectivePrompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.adapt.standin import StandIn

STAND_INS: tuple[type[StandIn], ...] = (
    *(ConvolvePrompt, ConvolveStep, ScanPrompt, ScanStep),
    *(SelectivePrompt, CorrectPrompt, CorrectStep),
)


def stand_in_for(function: Callable[..., Any]) -> type[StandIn] | None:
    """The kind of stand-in for a function of a model's file, by the names of its arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    return next((kind for kind in STAND_INS if kind.takes == names), None)
