"""gated_delta_rule in Triton; its programs come from `kernels/helion/gated_delta_rule.py`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.calling import load_target
from polysilicon.kernels import state_walks
from polysilicon.kernels.triton.exported import gated_delta_rule as exported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from polysilicon.records import Compiled, Device


def gated_delta_rule(
    q: Tensor,  # [T, hk, dk]
    k: Tensor,  # [T, hk, dk]
    v: Tensor,  # [T, hv, dv]
    g: Tensor,  # [T, hv]
    beta: Tensor,  # [T, hv]
    scale: float,
    normalize: bool,
    chunk: int,
    state: Tensor,  # float32 [slots, hv, dk, dv]
    query_starts: Tensor,  # int32 [B + 1]
    state_slots: Tensor,  # int32 [B]
    seen: Tensor,  # int32 [B]
    max_query: int,
) -> Tensor:
    """The op's contract (polysilicon/ops/gated_delta_rule.py), without a read on the host."""
    del chunk, max_query
    program = exported.unit_length if normalize else exported.as_given
    sequences = (query_starts, state_slots, seen)
    return state_walks.delta_rule(program, (q, k, v, g, beta), state, sequences, scale, normalize)


def offline(device: Device) -> Iterator[Compiled]:
    """A decode step of 64 sequences with the head sizes of published models, and the largest."""
    judged = load_target(str(device.facts["triton"]))

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for size in (64, 128, 256):
        for normalize in (True, False):
            call: dict[str, Any] = {
                "q": meta(64, 16, size),
                "k": meta(64, 16, size),
                "v": meta(64, 32, size),
                "g": meta(64, 32, dtype=torch.float32),
                "beta": meta(64, 32),
                "scale": size**-0.5,
                "normalize": normalize,
                "chunk": 64,
                "state": meta(65, 32, size, size, dtype=torch.float32),
                "query_starts": meta(65, dtype=torch.int32),
                "state_slots": meta(64, dtype=torch.int32),
                "seen": meta(64, dtype=torch.int32),
                "max_query": 1,
            }
            launch = functools.partial(gated_delta_rule, **call)
            yield from judged(device, "gated_delta_rule.triton", f"heads of {size}", launch)
