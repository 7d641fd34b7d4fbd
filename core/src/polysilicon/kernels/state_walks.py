"""How the programs that walk over a sequence's tokens with its state are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def delta_rule(
    program: Callable[..., object],
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],  # q, k, v, g, beta
    state: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],  # query_starts, state_slots, seen
    scale: float,
    normalize: bool,
) -> Tensor:
    """gated_delta_rule by a program of it; what is read by no sequence stays zero.

    Raises:
        ValueError: each key channel has a decay of its own.
    """
    key, value, decay = rows[1], rows[2], rows[3]
    if decay.dim() != 2:
        raise ValueError(
            f"this kernel of gated_delta_rule got decays {tuple(decay.shape)}, expected one a head "
            "[T, hv]: state by_channel in the problem, so that another kernel is chosen"
        )
    out = torch.zeros_like(value)
    if sequences[1].numel() and value.numel():
        shared = value.shape[1] // key.shape[1]
        program(*rows, state, *sequences, out, scale, normalize, shared)
    return out
