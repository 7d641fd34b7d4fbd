"""The base of layers that carry a state from token to token: convolutions, scans, delta rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polysilicon.errors import AdaptError
from polysilicon.layers.attention import PagedContext
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """How T tokens laid end to end belong to B sequences, and where their states lie.

    The last four arguments of every recurrent op.

    Attributes:
        query_starts: int32 [B + 1], first token of each sequence, then the end of the last.
        state_slots: int32 [B], row of the state that each sequence reads and writes; -1: none.
        seen: int32 [B], tokens of each sequence before these; 0: it starts from a zero state, and
            what its row holds is not read.
        max_query: upper bound of the tokens of one sequence; 1 tells a decode step.
    """

    query_starts: Tensor
    state_slots: Tensor
    seen: Tensor
    max_query: int


def dense_sequences(batch: int, length: int, *, carried: bool, device: torch.device) -> Sequences:
    """The sequences of a dense [batch, length, ...] call whose states are rows 0 to batch - 1."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    seen = torch.full((batch,), int(carried), dtype=torch.int32, device=device)
    return Sequences(starts, slots, seen, length)


class Recurrent(Layer):
    """A layer with one state a sequence.

    Outside the engine (`context.batch` is None) states are what the caller passes. Inside, the
    b = 1 row holds the step's tokens end to end, and each sequence's state lies in a row of the
    pool that the engine attached.

    Args:
        name: the layer's name in its model, for errors.
        context: shared by all attention and recurrent layers of a model.
    """

    #: [slots, *state_shape()], the engine's; a plain attribute, as it is no state of the model.
    state: Tensor | None

    def __init__(self, *, name: str = "", context: PagedContext | None = None) -> None:
        super().__init__()
        self.name = name
        self.context = PagedContext() if context is None else context
        self.detach_state()

    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one sequence."""
        raise NotImplementedError  # each layer states its own

    def state_dtype(self) -> torch.dtype:
        """Dtype of the state."""
        raise NotImplementedError  # each layer states its own

    def attach_state(self, state: Tensor) -> None:
        """Gives the layer the states of the engine's sequences, [slots, *state_shape()].

        Raises:
            ValueError: of another shape or dtype.
        """
        if state.shape[1:] != self.state_shape() or state.dtype != self.state_dtype():
            raise ValueError(
                f"{type(self).__name__} {self.name!r} was given states {tuple(state.shape)} of "
                f"{state.dtype}: expected [slots, {', '.join(map(str, self.state_shape()))}] of "
                f"{self.state_dtype()}"
            )
        object.__setattr__(self, "state", state)

    def state_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return math.prod(self.state_shape()) * self.state_dtype().itemsize

    def allocate_states(
        self, slots: int, *, device: torch.device | str = "cpu", fill: float = 0.0
    ) -> None:
        """Makes the states of `slots` sequences and attaches them."""
        shape = (slots, *self.state_shape())
        self.attach_state(torch.full(shape, fill, dtype=self.state_dtype(), device=device))

    def detach_state(self) -> None:
        """Drops the states; the layer then works outside the engine only."""
        object.__setattr__(self, "state", None)

    def paged(self, tokens: int) -> tuple[Tensor, Sequences] | None:
        """The engine's states and the sequences of its step; None outside the engine.

        Raises:
            AdaptError: the engine runs a step that this layer has no states for.
        """
        batch = self.context.batch
        if batch is None:
            return None
        if self.state is None or batch.state_slots is None or batch.seen is None:
            raise AdaptError(
                f"{type(self).__name__} {self.name!r} has no states: call attach_state() on every "
                "recurrent layer and give the paged batch its state_slots"
            )
        if tokens != batch.slots.shape[0]:
            raise AdaptError(
                f"{type(self).__name__} {self.name!r} got {tokens} tokens in a paged step of "
                f"{batch.slots.shape[0]}: expected all of them in one row"
            )
        sequences = Sequences(batch.query_starts, batch.state_slots, batch.seen, batch.query_bound)
        return self.state, sequences

    def states(
        self, batch: int, length: int, state: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Sequences]:
        """States and sequences of one forward: the engine's, else a copy of the caller's or zeros.

        Args:
            batch: sequences of a dense call.
            length: tokens of each.
            state: [batch, *state_shape()] of a dense call, None for a beginning.
            device: where the tokens are.
        """
        found = self.paged(batch * length)
        if found is not None:
            return found
        sequences = dense_sequences(batch, length, carried=state is not None, device=device)
        if state is not None:
            return state.to(self.state_dtype(), copy=True), sequences
        shape = (batch, *self.state_shape())
        return torch.zeros(shape, dtype=self.state_dtype(), device=device), sequences
