"""Recognises position tables that work out the positions themselves (BART, OPT, Marian …)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from polysilicon.adapt import structure
from polysilicon.adapt.probe import Inputs, Unverified, call, verify
from polysilicon.layers.base import Layer, dtype_name
from polysilicon.ops import embedding
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polysilicon.adapt.structure import Candidate

#: Positions from the shape of the ids, or counted over the ones of an attention mask.
Rule = Literal["shape", "mask"]

#: What becomes of positions that the caller gives: taken as they are, or with a batch dim added.
Given = Literal["plain", "batched"]

#: Shape of the result where positions are worked out: a row for each batch entry, one row, none.
Rows = Literal["batch", "one", "none"]


class PositionTable(Layer):
    """Rows of a table at positions that follow from the first argument.

    Args:
        weight: [positions, hidden].
        offset: rows before the one of position 0.
        rule: see `Rule`.
        given: see `Given`.
        rows: see `Rows`.
    """

    embedding: Callable[..., Tensor]

    def __init__(
        self, weight: nn.Parameter, offset: int, rule: Rule, given: Given, rows: Rows
    ) -> None:
        super().__init__()
        self.weight = weight
        self.offset, self.rule, self.given, self.rows = offset, rule, given, rows
        self.bind_kernel("embedding", embedding.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        """One look-up."""
        facts = {"vocabulary": self.weight.shape[0], "hidden": self.weight.shape[1], "scale": 1.0}
        dtype = dtype_name(self.weight.dtype)
        return {"embedding": Problem(op="embedding", dtype=dtype, facts=facts)}

    def forward(
        self,
        first: Any,  # ids or mask [batch, tokens], or the shape of the ids
        cache_length: int = 0,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """[batch, tokens, hidden], or without the batch where the model expects it so."""
        if position_ids is None:
            position_ids = self._positions(first, cache_length)
        elif self.given == "batched":
            position_ids = position_ids.unsqueeze(0)
        rows: Tensor = self.embedding(position_ids + self.offset, self.weight, 1.0)
        return rows

    def _positions(self, first: Any, cache_length: int) -> Tensor:
        if self.rule == "mask":
            seen = torch.cumsum(first, dim=1)
            counted: Tensor = (seen * first - 1).long()
            return counted[:, cache_length:]
        shape = first.shape if isinstance(first, Tensor) else first
        steps = torch.arange(shape[1], device=self.weight.device) + cache_length
        if self.rows == "none":
            return steps
        return steps.expand(shape[0] if self.rows == "batch" else 1, -1)


def recognise_positions(candidate: Candidate) -> tuple[Layer, float]:
    """Our table that finds the same rows, and the error measured.

    Raises:
        Unverified: no rule reproduced the module.
    """
    weight = structure.parameters(candidate.module)["weight"]
    numbers = [int(n) for n in structure.numbers(candidate.module) if 0 < n < 8 and n == int(n)]
    reason = "the probe prompt did not reach it"
    rules: tuple[Rule, ...] = ("shape", "mask")
    given: tuple[Given, ...] = ("plain", "batched")
    rows: tuple[Rows, ...] = ("batch", "one", "none")
    for rule, offset, how, shape in itertools.product(rules, (0, *numbers), given, rows):
        layer = PositionTable(weight, offset, rule, how, shape)
        try:
            probes = list(_probes(candidate, rule, weight))
            error = verify(candidate.module, layer, probes, dtype=weight.dtype)
        except Unverified as failure:
            reason = str(failure)
            continue
        return layer, error
    raise Unverified(reason)


def _probes(candidate: Candidate, rule: Rule, weight: Tensor) -> Iterator[Inputs]:
    """Whole prompts and one step after a cache; padded where a mask is counted; given positions."""
    recorded = candidate.call
    if recorded is None:
        raise Unverified("the probe prompt did not reach it")
    first = recorded.args[0] if recorded.args else next(iter(recorded.kwargs.values()), None)
    for batch, tokens, length in ((2, 5, 0), (1, 5, 0), (2, 1, 4), (2, 3, 4)):
        if isinstance(first, Tensor) and first.dim() == 2:
            total = tokens + length if rule == "mask" else tokens
            value = torch.ones(batch, total, dtype=first.dtype, device=weight.device)
            if rule == "mask" and batch == 2:
                value[1, :2] = 0
            yield call(value, length)
        elif isinstance(first, (tuple, torch.Size)):
            yield call(torch.Size((batch, tokens)), length)
        else:
            raise Unverified("its first argument is neither ids nor a mask nor a shape")
    positions = torch.tensor([[0, 3, 1]], device=weight.device)
    start = call(value if isinstance(first, Tensor) else torch.Size((1, 3)), 0)
    for given in (positions, positions[0]):
        yield Inputs(start.args, {"position_ids": given})
