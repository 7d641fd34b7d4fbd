"""The attention pass: our layer behind Transformers' interface, in one piece where it fits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from polysilicon.adapt import (
    applying,
    attention_in_code,
    branching,
    fusing,
    own_attention,
    structure,
)
from polysilicon.adapt.attention import build_attention, check_mask
from polysilicon.adapt.interface import CHILD, KNOWN, Interface, Recorder, original_function
from polysilicon.adapt.latent import attend_to_latents
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.recording import record
from polysilicon.layers.attention import Attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from polysilicon.adapt.surgery import Surgery
    from polysilicon.adapt.work import Work


def configs_of(model: nn.Module) -> list[Any]:
    """Every config object from which a module of the model may read its implementation."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for one in (config, *_sub_configs(config)):
            if hasattr(one, "_attn_implementation_internal"):
                found[id(one)] = one
    return list(found.values())


def _sub_configs(config: Any) -> list[Any]:
    return [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]


@dataclass
class Switch:
    """Which implementation every config named before, and how a module's own is told."""

    before: dict[int, str]

    @property
    def masks(self) -> str:
        """Kind of mask that every module of the model can read."""
        return "eager" if "eager" in self.before.values() else "sdpa"

    def implementation(self, module: nn.Module) -> str:
        """What `module` used before the switch."""
        return self.before[id(module.config)]

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The attention function that `module` called before the switch."""
        return original_function(module, self.implementation(module))


def implementations(model: nn.Module) -> dict[int, str]:
    """id of a config → the implementation that it names, where it is one that we know."""
    named = {id(one): one._attn_implementation_internal for one in configs_of(model)}
    return {key: name for key, name in named.items() if name in KNOWN}


def keep_module(module: nn.Module, switch: Switch, surgery: Surgery) -> None:
    """A module that stays reads its old implementation from a config of its own."""
    config: Any = copy.copy(module.config)
    config._attn_implementation_internal = switch.implementation(module)
    surgery.set_attribute(module, "config", config)


def original_of_config(module: nn.Module) -> Callable[..., Any]:
    """The attention function that the module's config names now."""
    config: Any = module.config
    return original_function(module, config._attn_implementation_internal)


class Attending:
    """The switch of configs, what was recorded under it, and what came of it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.interface = Interface(work.context)
        self.switch = Switch(implementations(work.model))
        #: path → why our layer can't take what the module passed under our name
        self._refused: dict[str, str] = {}

    def record(self) -> None:
        """Runs the probe prompts with every module call and attention call written down."""
        recorder = Recorder(self.switch.original)
        self.interface.recorder = recorder
        self.interface.mask_implementation = self.switch.masks
        mark = self.work.surgery.mark
        self._switch()
        try:
            recording = record(self.work.model, self.work.scenarios)
        finally:
            self.work.surgery.undo(mark)
            self.interface.recorder = None
        recording.attention, recording.masks = recorder.calls, recorder.masks
        self.work.recording = recording

    def replace(self) -> None:
        """Puts our layer into every module that called the interface; lists the others."""
        work = self.work
        self._switch()
        for path, module in work.modules.items():
            if module in work.recording.attention:
                self._attach(path, module)
            elif not structure.is_leaf(module):
                self._attach_own(path, module)
        self._attach_branching()
        self._share_caches()
        reasons = attention_in_code.replace_attention_in_code(work)
        applying.replace_rotations(work)
        list_attention(work, partial(attention_in_code.why_kept, work, reasons))
        kept = any(r.kind == "attention" and r.status == "kept" for r in work.rows.values())
        in_code = any(attention_in_code.CHILD in m._modules for m in work.modules.values())
        if not kept and not in_code:
            # Additive masks are for the eager functions of modules that stay, and for own code.
            self.interface.mask_implementation = "sdpa"

    def _switch(self) -> None:
        """Every config that names an implementation we know names ours."""
        for config in configs_of(self.work.model):
            if id(config) in self.switch.before:
                self.work.surgery.set_attribute(
                    config, "_attn_implementation_internal", self.interface.name
                )

    def _attach_own(self, path: str, module: nn.Module) -> None:
        """A module that attends in its own code is ours only in one piece."""
        work = self.work
        try:
            layer, error, mask = own_attention.attend(work, path, module)
        except Unverified:
            # Its code may branch on the implementation's name; a model's config is not its own.
            shared = isinstance(module, PreTrainedModel)
            if not shared and id(getattr(module, "config", None)) in self.switch.before:
                keep_module(module, self.switch, work.surgery)
            return
        work.attention[path] = layer
        paged = check_mask(layer, mask, work.recording)
        work.paged = work.paged or (f"{path}: {paged}" if paged else "")
        work.replaced(path, "attention", module.get_submodule(fusing.CHILD), error)

    def _attach(self, path: str, module: nn.Module) -> None:
        work = self.work
        calls = work.recording.attention[module]
        try:
            layer, error = build_attention(
                module, calls, self.switch.original(module), self.interface.context, path
            )
        except Unverified as failure:
            keep_module(module, self.switch, work.surgery)
            self._refused[path] = str(failure)
            return
        work.surgery.attach(module, CHILD, layer)
        work.attention[path] = layer
        paged = check_mask(layer, calls[0].mask, work.recording)
        work.paged = work.paged or (f"{path}: {paged}" if paged else "")
        if not self._attend_to_latents(path, module, layer, error):
            self._fuse(path, module, layer, error)

    def _attach_branching(self) -> None:
        """A module that passed strange arguments under our name may take them under its own."""
        modules = {path: self.work.modules[path] for path in self._refused}
        for path in branching.replace_branching(self.work, modules, original_of_config):
            self._keep(path, self._refused[path])

    def _attend_to_latents(
        self, path: str, module: nn.Module, layer: Attention, error: float
    ) -> bool:
        """Whether keys and values are expanded from latents; the engine then caches those."""
        work, recording = self.work, self.work.recording
        seen, attended = recording.calls[module][0], recording.attention[module][0]
        try:
            found = attend_to_latents(module, layer, seen, attended, work.surgery)
        except Unverified as failure:
            note = f"the engine caches its keys and values, not its latents: {failure}"
            work.replaced(path, "attention", layer, error, note)
            return True
        if found is None:
            return False
        latent, call = found
        work.surgery.replace(module, CHILD, call)
        work.attention[path] = latent
        work.replaced(path, "attention", latent, error)
        return True

    def _fuse(self, path: str, module: nn.Module, layer: Attention, error: float) -> None:
        work = self.work
        try:
            worst = fusing.fuse(module, layer, work.recording, work.surgery)
        except Unverified as failure:
            work.replaced(path, "attention", layer, error, f"q, k, v stay apart: {failure}")
            return
        fused = module.get_submodule(fusing.CHILD)
        work.replaced(path, "attention", fused, max(error, worst))

    def _share_caches(self) -> None:
        """A layer that is given the very keys and values of an earlier one reads its cache."""
        work, owners = self.work, dict[tuple[int, ...], Attention]()
        for path, module in work.modules.items():
            calls = work.recording.attention.get(module)
            if calls is None or path not in work.attention:
                continue
            layer = work.attention[path]
            if not isinstance(layer, Attention):
                continue
            given = tuple(id(x) for call in calls for x in (call.key, call.value))
            owner = owners.setdefault(given, layer)
            if owner is not layer:
                layer.share_cache(owner)
                # Such models drop the queries that no layer behind needs.
                self.interface.always_masks = True

    def _keep(self, path: str, reason: str) -> None:
        self.work.kept(path, "attention", reason)
        self.work.paged = self.work.paged or f"{path} was kept: {reason}"

    def take_back(self, mark: int, reason: str) -> None:
        """Undoes the pass; every module has the implementation that it had before."""
        work = self.work
        work.surgery.undo(mark)
        for path, module in work.modules.items():
            if module in work.recording.attention or path in work.attention:
                self._keep(path, reason)
        for row in list(work.rows.values()):
            if row.module != row.path and row.status == "replaced":
                work.kept(row.path, row.kind, reason)
        work.attention.clear()


def list_attention(work: Work, reason: Callable[[str, nn.Module], str]) -> None:
    """Lists the attention modules that did not call the interface, each with its reason."""
    for path, module in work.modules.items():
        if module not in work.recording.attention and _attends_by_itself(path, module, work):
            work.kept(path, "attention", reason(path, module))


def _attends_by_itself(path: str, module: nn.Module, work: Work) -> bool:
    """By its name, for the report only: nothing else tells what unknown code computes."""
    if path in work.rows or "attention" not in type(module).__name__.lower():
        return False
    mixers = (row.path for row in work.rows.values() if row.kind == "mixer")
    inside = any(other.startswith(f"{path}.") for other in (*work.attention, *mixers))
    return not inside and not any(m in work.recording.attention for m in module.modules())
