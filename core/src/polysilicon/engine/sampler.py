"""Draws the next token of every request of a step, each by its own parameters and seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polysilicon.layers.base import Layer
from polysilicon.ops import sampling
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from polysilicon.engine.request import Request


class Sampler(Layer):
    """The `sampling` op over requests. Their parameters become tensors once, not in every step."""

    sampling: Callable[..., Tensor]

    def __init__(self, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._known: tuple[int, ...] = ()
        self._columns: dict[str, Tensor] = {}
        self.bind_kernel("sampling", sampling.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        """The one op slot."""
        dtype = str(self._dtype).removeprefix("torch.")
        facts = {"vocabulary": self._vocabulary}
        return {"sampling": Problem(op="sampling", dtype=dtype, facts=facts)}

    def forward(
        self,
        logits: Tensor,  # [n, V]
        requests: Sequence[Request],
    ) -> list[int]:
        """One token for each request; -1 where the logits are no distribution (NaN)."""
        known = tuple(request.id for request in requests)
        if known != self._known:
            self._columns = _parameters(requests)
            self._known = known
        made = [len(request.tokens) - request.prompt_tokens for request in requests]
        tokens: list[int] = self.sampling(
            logits, **self._columns, steps=torch.tensor(made), seen=_seen(requests)
        ).tolist()
        return tokens


def _parameters(requests: Sequence[Request]) -> dict[str, Tensor]:
    every = [request.params for request in requests]
    columns: dict[str, list[Any]] = {
        "temperature": [float(params.temperature) for params in every],
        "top_k": [params.top_k for params in every],
        "top_p": [float(params.top_p) for params in every],
        "min_p": [float(params.min_p) for params in every],
        "penalty": [float(params.repetition_penalty) for params in every],
        "seeds": [request.seed for request in requests],
    }
    return {name: torch.tensor(column) for name, column in columns.items()}


def _seen(requests: Sequence[Request]) -> Tensor | None:  # int64 [n, S]
    """The tokens that a penalty applies to; None when no request has one."""
    if all(request.params.repetition_penalty == 1 for request in requests):
        return None
    rows = [r.tokens if r.params.repetition_penalty != 1 else [] for r in requests]
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])
