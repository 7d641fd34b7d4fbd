"""Attention modules whose code asks for the implementation's name before it calls it.

They keep the name that they know, in a config of their own, and take every branch as before; the
table of implementations that their code names becomes ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polysilicon.adapt import structure
from polysilicon.adapt.attention import build_attention, check_mask
from polysilicon.adapt.attention_in_code import CHILD
from polysilicon.adapt.interface import AttentionCall, refuse_training, refuse_weights, run_layer
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.rebinding import Rebound, forget, innermost, rebind
from polysilicon.adapt.recording import run_probe
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from polysilicon.adapt.work import Work
    from polysilicon.layers.attention import Attention
    from polysilicon.records import Problem


class OwnTable(Layer):
    """What one module's code takes for the table of implementations: all of them are our layer."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.attend = attend

    def problems(self) -> dict[str, Problem]:
        """None of its own."""
        return {}

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The layer, on the terms of an attention function of Transformers."""
        del name, default
        return self.forward

    def forward(
        self,
        module: nn.Module,
        query: Tensor,  # [b, h, tq, d]
        key: Tensor,  # [b, hk, tk, d]
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[b, tq, h, dv] and None for the weights, which are never held."""
        del module
        refuse_training(self)
        refuse_weights(kwargs)
        return run_layer(self.attend, query, key, value, attention_mask), None


class _NotingTable:
    """Notes what a module passes to the function that it called before."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.calls: list[AttentionCall] = []

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The module's own function, noted."""

        def noted(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            self.calls.append(AttentionCall(query, key, value, mask, dict(kwargs)))
            return self.original(module, query, key, value, mask, **kwargs)

        return noted


def replace_branching(
    work: Work, kept: dict[str, nn.Module], original: Callable[[nn.Module], Callable[..., Any]]
) -> dict[str, str]:
    """Puts our layer behind the table that these modules' code names; path → why one stays.

    Each must have a config of its own with the implementation's old name by now; `original` tells
    the function that it called.
    """
    reasons: dict[str, str] = {}
    tables: dict[str, _NotingTable] = {}
    made: list[str] = []
    mark = work.surgery.mark
    try:
        for path, module in kept.items():
            try:
                name = _table_name(module)
                tables[path] = _NotingTable(original(module))
                forward, file = rebind(type(module).forward, {name: tables[path]})
            except Unverified as failure:
                reasons[path] = str(failure)
                continue
            made.append(file)
            work.surgery.set_attribute(module, "forward", forward.__get__(module))
        if made:
            run_probe(work.model, work.scenarios)
    finally:
        work.surgery.undo(mark)
        for file in made:
            forget(file)
    for path in [path for path in tables if path not in reasons]:
        try:
            _replace(work, path, kept[path], tables[path])
        except Unverified as failure:
            reasons[path] = str(failure)
    return reasons


def _table_name(module: nn.Module) -> str:
    """Global name of Transformers' table in the forward of a module that asks for names."""
    if "forward" in vars(module) or structure.obstacle(module):
        raise Unverified("its forward was replaced before, or it must not be touched")
    function = innermost(type(module).forward)
    named = function.__code__.co_names
    tables = [n for n in named if function.__globals__.get(n) is ALL_ATTENTION_FUNCTIONS]
    if len(tables) != 1 or "_attn_implementation" not in named:
        raise Unverified("its code does not ask for the implementation's name")
    return tables[0]


def _replace(work: Work, path: str, module: nn.Module, table: _NotingTable) -> None:
    if not table.calls:
        raise Unverified("the probe prompts did not reach it")
    layer, error = build_attention(module, table.calls, table.original, work.context, path)
    rebound = Rebound(module, {_table_name(module): OwnTable(layer)})
    work.surgery.attach(module, CHILD, rebound)
    work.surgery.set_attribute(module, "forward", rebound.forward)
    work.attention[path] = layer
    paged = check_mask(layer, table.calls[0].mask, work.recording)
    work.paged = work.paged or (f"{path}: {paged}" if paged else "")
    note = "q, k, v stay apart: its code asks for the implementation's name"
    work.replaced(path, "attention", layer, error, note)
