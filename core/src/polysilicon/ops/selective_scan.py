"""selective_scan: Mamba-1's state-space recurrence, one state a channel (arXiv:2312.00752).

T tokens of B sequences laid end to end, C channels with n state numbers each. With d = dt after
bias and softplus: S ← exp(a · d) · S + d · x ⊗ b, y = S · c + D · x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source
from polysilicon.ops.sequences import MIXTURES, SLOTS, decoding, groups, layout, spoil, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from polysilicon.records import Problem


def torch_kernel(
    x: Tensor,  # [T, C]
    dt: Tensor,  # [T, C]
    a: Tensor,  # [C, n], negative
    b: Tensor,  # [T, n]
    c: Tensor,  # [T, n]
    d: Tensor | None,  # [C]
    dt_bias: Tensor | None,  # [C]
    dt_softplus: bool,
    chunk: int,  # tokens whose decays and states are held at once
    state: Tensor,  # float32 [slots, C, n]
    query_starts: Tensor,  # int32 [B + 1]
    state_slots: Tensor,  # int32 [B], -1: no state, results zero
    seen: Tensor,  # int32 [B], 0: the state is not read
    max_query: int,
) -> Tensor:  # [T, C]; zero for padding
    """All that does not depend on the state a chunk at once, then one product a token; float32."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = F.softplus(step) if dt_softplus else step
    out = torch.zeros_like(x)
    for group in groups(query_starts, state_slots, seen):
        parts = [group.read(value).float() for value in (x, step, b, c)]
        held, ys = group.load(state), []
        for start in range(0, group.length, chunk):
            rows, steps, keys, queries = (value[:, start : start + chunk] for value in parts)
            y, held = _chunk(rows, steps, keys, queries, a.float(), held)
            ys.append(y)
        y = torch.cat(ys, 1)
        if d is not None:
            y = y + d.float() * parts[0]
        group.write(out, y)
        state[group.slots] = held
    return out


def _chunk(
    x: Tensor,  # [G, l, C]
    step: Tensor,  # [G, l, C]
    b: Tensor,  # [G, l, n]
    c: Tensor,
    a: Tensor,  # [C, n]
    state: Tensor,  # [G, C, n]
) -> tuple[Tensor, Tensor]:
    # Tokens first: what one token reads and writes is then one stretch of memory.
    step, x = step.transpose(0, 1), x.transpose(0, 1)
    decays = (step[..., None] * a).exp_()
    states = (step * x)[..., None] * b.transpose(0, 1)[:, :, None]  # [l, G, C, n]
    for token in range(len(states)):
        state = states[token].addcmul_(decays[token], state)
    y = states @ c.transpose(0, 1)[..., None]
    return y[..., 0].transpose(0, 1), state


def selective_scan_fake(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    chunk: int,
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
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    chunk: int,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """The recurrence in float64, one token at a time."""

    def advance(held: Tensor, token: int) -> tuple[Tensor, Tensor]:
        step = dt[token].double() + (0 if dt_bias is None else dt_bias.double())
        step = torch.logaddexp(step, torch.zeros_like(step)) if dt_softplus else step
        held = (step[:, None] * a.double()).exp() * held
        held = held + (step * x[token].double())[:, None] * b[token].double()
        y = (held * c[token].double()).sum(-1)
        return held, y if d is None else y + d.double() * x[token].double()

    return walk(x.shape, state, query_starts, state_slots, seen, advance)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source, wide = Source(dtype, device), Source(torch.float32, device, seed=1)

    def sample(name: str, told: str = "", **given: Any) -> Sample:
        tokens, rest = layout(name, source)
        kwargs: dict[str, Any] = {
            "x": source.normal(tokens, 24),
            "dt": source.normal(tokens, 24),
            "a": -wide.normal(24, 16).exp(),
            "b": source.normal(tokens, 16, magnitude=0.25),
            "c": source.normal(tokens, 16),
            "d": wide.normal(24),
            "dt_bias": wide.normal(24),
            "dt_softplus": True,
            "chunk": 16,
            "state": spoil(wide.normal(SLOTS, 24, 16), name),
        }
        return Sample(name=f"{name}{told}", kwargs=kwargs | given | rest)

    for name in MIXTURES:
        yield sample(name)
    positive = source.normal(layout("mixture", source)[0], 24).sigmoid()
    yield sample("mixture", ", as it is", d=None, dt_bias=None, dt_softplus=False, dt=positive)
    forgets = torch.full((24, 16), -1e3, device=device)
    yield sample("chunk with a past", ", forgets all", a=forgets, chunk=64)


def _inputs(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A decode step of the problem's shapes, one token a sequence."""
    source, wide = Source(dtype, device), Source(torch.float32, device, 1)
    channels = int(problem.fact("channels") or 256)
    inner = int(problem.fact("state") or 16)
    return {
        "x": source.normal(tokens, channels),
        "dt": source.normal(tokens, channels),
        "a": -wide.normal(channels, inner).exp(),
        "b": source.normal(tokens, inner, magnitude=inner**-0.5),
        "c": source.normal(tokens, inner),
        "d": wide.normal(channels),
        "dt_bias": wide.normal(channels),
        "dt_softplus": True,
        "chunk": int(problem.fact("chunk") or 64),
        "state": wide.normal(tokens, channels, inner),
        **decoding(tokens, device),
    }


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return 16 * (int(kwargs["max_query"]) + int(kwargs["b"].shape[-1]))


OP = Op(
    name="selective_scan",
    schema=(
        "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
        "bool dt_softplus, int chunk, Tensor(a!) state, Tensor query_starts, Tensor state_slots, "
        "Tensor seen, SymInt max_query) -> Tensor"
    ),
    keys=frozenset({"channels", "state", "chunk"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_inputs,
    mutates=("state",),
    tokens=len,
    source="https://arxiv.org/abs/2312.00752",
)
