"""The state of one run of adapt(), shared by its passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from polysilicon.adapt.recording import Recording
from polysilicon.adapt.report import Row
from polysilicon.adapt.structure import Candidate, first_tensor
from polysilicon.adapt.surgery import Surgery
from polysilicon.layers.attention import Attention, PagedContext
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from torch import nn

    from polysilicon.adapt.recording import Scenario
    from polysilicon.adapt.report import Kind
    from polysilicon.layers.latent_attention import LatentAttention
    from polysilicon.layers.recurrent import Recurrent

#: Where a module stands: its parent and its name there.
Place = tuple["nn.Module", str]


@dataclass
class Work:
    """One model under adaptation: what was recorded of it, the changes and the rows so far."""

    model: nn.Module
    surgery: Surgery = field(default_factory=Surgery)
    context: PagedContext = field(default_factory=PagedContext)
    recording: Recording = field(default_factory=Recording)
    rows: dict[str, Row] = field(default_factory=dict)
    attention: dict[str, Attention | LatentAttention] = field(default_factory=dict)
    #: layers with a state: path of the mixer and what it calls → layer, in the model's order
    recurrent: dict[str, Recurrent] = field(default_factory=dict)
    #: Why the engine can't run the model; empty if it can.
    paged: str = ""
    #: the point of the surgery that `keep_all` returns to
    start: int = 0
    #: how the probe prompts can be run
    scenarios: list[Scenario] = field(default_factory=list)

    def __post_init__(self) -> None:
        floating = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.dtype = next(floating, torch.float32)
        self.look()

    def look(self) -> None:
        """Notes which modules the model has now."""
        #: the model's own modules, before any change: path → module, each once
        self.modules = {path: module for path, module in self.model.named_modules() if path}
        self.places = places(self.model)

    def candidate(self, path: str, module: nn.Module) -> Candidate:
        """The module with its first recorded call."""
        calls = self.recording.calls.get(module, [])
        first = calls[0] if calls else None
        seen = first_tensor(first)
        floating = seen is not None and seen.is_floating_point()
        return Candidate(
            path, module, first, seen.dtype if floating and seen is not None else self.dtype
        )

    def replace(self, path: str, module: nn.Module, layer: nn.Module) -> None:
        """Puts `layer` wherever the model holds `module`."""
        for parent, name in self.places[module]:
            self.surgery.replace(parent, name, layer)

    def replaced(
        self, path: str, kind: Kind, layer: nn.Module, error: float, note: str = ""
    ) -> None:
        """Notes a row for a module that our layer stands for now."""
        self.rows[path] = Row(
            path=path,
            kind=kind,
            status="replaced",
            replaced_by=type(layer).__name__,
            op=ops_of(layer),
            reason=note,
            error=error,
        )

    def keep_all(self, reason: str) -> None:
        """Takes every replacement back, because of what all of them do together."""
        self.surgery.undo(self.start)
        self.attention.clear()
        self.recurrent.clear()
        for row in list(self.rows.values()):
            loaded = isinstance(self.modules[row.module], Layer)
            if row.status == "replaced" and not loaded:
                self.kept(row.path, row.kind, reason)

    def kept(self, path: str, kind: Kind, reason: str) -> None:
        """Notes a row for a module that stays."""
        self.rows[path] = Row(path=path, kind=kind, status="kept", reason=reason)


def places(model: nn.Module) -> dict[nn.Module, list[Place]]:
    """Every place of every module: shared ones stand in several."""
    found: dict[nn.Module, list[Place]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


def ops_of(layer: nn.Module) -> str:
    """Names of the ops of a layer and its own parts, for the report."""
    names: dict[str, None] = {}
    for part in layer.modules():
        if isinstance(part, Layer):
            names.update(dict.fromkeys(problem.op for problem in part.problems().values()))
    return ", ".join(names)
