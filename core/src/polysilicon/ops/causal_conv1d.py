"""causal_conv1d: a short convolution of every channel over its past, with a state a sequence.

T tokens of B sequences laid end to end, C channels, W taps; the state is the last W - 1 inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops import activation as activations
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source
from polysilicon.ops.sequences import MIXTURES, SLOTS, decoding, groups, layout, spoil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from polysilicon.records import Problem


def torch_kernel(
    x: Tensor,  # [T, C]
    weight: Tensor,  # [C, W], the last tap is the token's own
    bias: Tensor | None,  # [C]
    activation: str,  # `identity` for none
    state: Tensor,  # [slots, C, W - 1] in the dtype of x
    query_starts: Tensor,  # int32 [B + 1]
    state_slots: Tensor,  # int32 [B], -1: no state, results zero
    seen: Tensor,  # int32 [B], 0: the state is not read
    max_query: int,
) -> Tensor:  # [T, C]; zero for padding
    """One grouped convolution for all sequences of one length."""
    out = torch.zeros_like(x)
    for group in groups(query_starts, state_slots, seen):
        past = group.load(state)
        inputs = torch.cat((past, group.read(x).transpose(1, 2)), -1)
        y = F.conv1d(inputs, weight[:, None].to(x.dtype), bias, groups=x.shape[1])
        group.write(out, activations.torch_kernel(y, activation).transpose(1, 2))
        state[group.slots] = inputs[..., group.length :]
    return out


def causal_conv1d_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """Shape function of every kernel of this op."""
    return torch.empty_like(x)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """The definition in float64, one token at a time over a list of its past."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    starts = query_starts.tolist()
    taps = weight.shape[1]
    for row, slot in enumerate(state_slots.tolist()):
        if slot < 0 or starts[row] == starts[row + 1]:
            continue
        zero = torch.zeros_like(x[0], dtype=torch.float64)
        past = [state[slot, :, i].double() if seen[row] else zero for i in range(taps - 1)]
        for token in range(starts[row], starts[row + 1]):
            past.append(x[token].double())
            y = sum((past[i - taps] * weight[:, i].double() for i in range(taps)), zero)
            out[token] = activations.reference(y if bias is None else y + bias.double(), activation)
        if taps > 1:
            state[slot] = torch.stack(past[1 - taps :], -1).to(state.dtype)
    return out


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def sample(name: str, channels: int, taps: int, activation: str, bias: bool) -> Sample:
        tokens, rest = layout(name, source)
        kwargs: dict[str, Any] = {
            "x": source.normal(tokens, channels),
            "weight": source.normal(channels, taps, magnitude=0.5),
            "bias": source.normal(channels) if bias else None,
            "activation": activation,
            "state": spoil(source.normal(SLOTS, channels, taps - 1), name),
        }
        return Sample(name=f"{name}, {taps} taps", kwargs=kwargs | rest)

    for name in MIXTURES:
        yield sample(name, 24, 4, "silu", True)
    for taps in (1, 2, 3):
        yield sample("mixture", 7, taps, "identity", False)


def _inputs(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A decode step of the problem's shapes, one token a sequence."""
    source = Source(dtype, device)

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    channels, taps = size("channels", 256), size("taps", 4)
    return {
        "x": source.normal(tokens, channels),
        "weight": source.normal(channels, taps, magnitude=0.5),
        "bias": source.normal(channels) if problem.fact("bias", False) else None,
        "activation": str(problem.fact("activation") or "silu"),
        "state": source.normal(tokens, channels, taps - 1),
        **decoding(tokens, device),
    }


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return int(kwargs["weight"].shape[1]) + 1


OP = Op(
    name="causal_conv1d",
    schema=(
        "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor(a!) state, "
        "Tensor query_starts, Tensor state_slots, Tensor seen, SymInt max_query) -> Tensor"
    ),
    keys=frozenset({"channels", "taps", "activation", "bias"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_inputs,
    mutates=("state",),
    tokens=len,
    source="https://arxiv.org/abs/2312.00752",
)
