"""ssd: Mamba-2's state-space recurrence (state space duality, arXiv:2405.21060), chunked.

T tokens of B sequences laid end to end, h heads of p numbers, g groups of n state numbers.
With d = dt after bias, softplus and limits: S ← exp(a · d) · S + d · x ⊗ b, y = S · c + D · x.
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
    x: Tensor,  # [T, h, p]
    dt: Tensor,  # [T, h]
    a: Tensor,  # [h], negative
    b: Tensor,  # [T, g, n]
    c: Tensor,  # [T, g, n]
    d: Tensor | None,  # [h]
    dt_bias: Tensor | None,  # [h]
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk: int,  # tokens of which the products are formed at once
    state: Tensor,  # float32 [slots, h, p, n]
    query_starts: Tensor,  # int32 [B + 1]
    state_slots: Tensor,  # int32 [B], -1: no state, results zero
    seen: Tensor,  # int32 [B], 0: the state is not read
    max_query: int,
) -> Tensor:  # [T, h, p]; zero for padding
    """Products inside a chunk, the state from chunk to chunk; all in float32."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (F.softplus(step) if dt_softplus else step).clamp(dt_min, dt_max)
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
            y = y + d.float()[:, None] * parts[0]
        group.write(out, y)
        state[group.slots] = held
    return out


def _chunk(
    x: Tensor,  # [G, l, h, p]
    step: Tensor,  # [G, l, h]
    b: Tensor,  # [G, l, g, n]
    c: Tensor,
    a: Tensor,  # [h]
    state: Tensor,  # [G, h, p, n]
) -> tuple[Tensor, Tensor]:
    heads = x.shape[2]
    b, c = (v.repeat_interleave(heads // v.shape[2], 2).transpose(1, 2) for v in (b, c))
    x, step = (x * step[..., None]).transpose(1, 2), step.transpose(1, 2)  # [G, h, l, …]
    decay = (step * a[:, None]).cumsum(-1)  # log of what is left since the chunk began
    length = x.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    # Masked before the exponential, which would overflow for what lies ahead.
    pairs = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    y = (c @ b.transpose(-1, -2) * pairs) @ x
    y = y + decay.exp()[..., None] * (c @ state.transpose(-1, -2))
    left = (decay[..., -1:] - decay).exp()[..., None]
    state = decay[..., -1].exp()[..., None, None] * state + (x * left).transpose(-1, -2) @ b
    return y.transpose(1, 2), state


def ssd_fake(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
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
    dt_min: float,
    dt_max: float,
    chunk: int,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """The recurrence in float64, one token at a time."""
    repeat = x.shape[1] // b.shape[1]

    def advance(held: Tensor, token: int) -> tuple[Tensor, Tensor]:
        step = dt[token].double() + (0 if dt_bias is None else dt_bias.double())
        step = torch.logaddexp(step, torch.zeros_like(step)) if dt_softplus else step
        step = step.clamp(dt_min, dt_max)
        keys, queries = (v[token].double().repeat_interleave(repeat, 0)[:, None] for v in (b, c))
        held = (step * a.double()).exp()[:, None, None] * held
        held = held + (step[:, None] * x[token].double())[..., None] * keys
        y = (held * queries).sum(-1)
        return held, y if d is None else y + d.double()[:, None] * x[token].double()

    return walk(x.shape, state, query_starts, state_slots, seen, advance)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source, wide = Source(dtype, device), Source(torch.float32, device, seed=1)

    def sample(name: str, told: str = "", heads: int = 4, shared: int = 2, **given: Any) -> Sample:
        tokens, rest = layout(name, source)
        kwargs: dict[str, Any] = {
            "x": source.normal(tokens, heads, 8),
            "dt": source.normal(tokens, heads),
            "a": -wide.normal(heads).exp(),
            "b": source.normal(tokens, shared, 16, magnitude=0.25),
            "c": source.normal(tokens, shared, 16),
            "d": wide.normal(heads),
            "dt_bias": wide.normal(heads),
            "dt_softplus": True,
            "dt_min": 0.0,
            "dt_max": float("inf"),
            "chunk": 16,
            "state": spoil(wide.normal(SLOTS, heads, 8, 16), name),
        }
        return Sample(name=f"{name}{told}", kwargs=kwargs | given | rest)

    for name in MIXTURES:
        yield sample(name)
    yield sample("mixture", ", limits", d=None, dt_bias=None, dt_min=0.1, dt_max=0.5, shared=1)
    yield sample(
        "chunk with a past", ", forgets all", a=torch.full((4,), -1e3, device=device), chunk=64
    )


def _inputs(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A decode step of the problem's shapes, one token a sequence."""
    source = Source(dtype, device)

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    wide = Source(torch.float32, device, 1)
    heads, width = size("heads", 8), size("head_size", 64)
    shared, inner = size("groups", 1), size("state", 128)
    return {
        "x": source.normal(tokens, heads, width),
        "dt": source.normal(tokens, heads),
        "a": -wide.normal(heads).exp(),
        "b": source.normal(tokens, shared, inner, magnitude=inner**-0.5),
        "c": source.normal(tokens, shared, inner),
        "d": wide.normal(heads),
        "dt_bias": wide.normal(heads),
        "dt_softplus": True,
        "dt_min": 0.0,
        "dt_max": float("inf"),
        "chunk": size("chunk", 64),
        "state": wide.normal(tokens, heads, width, inner),
        **decoding(tokens, device),
    }


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return 16 * (int(kwargs["max_query"]) + int(kwargs["b"].shape[-1]))


OP = Op(
    name="ssd",
    schema=(
        "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
        "bool dt_softplus, float dt_min, float dt_max, int chunk, Tensor(a!) state, "
        "Tensor query_starts, Tensor state_slots, Tensor seen, SymInt max_query) -> Tensor"
    ),
    keys=frozenset({"heads", "head_size", "groups", "state", "chunk"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_inputs,
    mutates=("state",),
    tokens=len,
    source="https://arxiv.org/abs/2405.21060",
)
