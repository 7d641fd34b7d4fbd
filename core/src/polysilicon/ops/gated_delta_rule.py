"""gated_delta_rule: linear attention whose state forgets and corrects itself (arXiv:2412.06464).

T tokens of B sequences laid end to end, hk key heads of dk, hv value heads of dv numbers; a key
head serves hv / hk value heads. S ← exp(g) · S, then S ← S + β · k ⊗ (v - Sᵀk), o = scale · Sᵀq.
A head's decay is one number, or one for each of its key channels (arXiv:2510.26692).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source
from polysilicon.ops.sequences import MIXTURES, SLOTS, decoding, groups, layout, spoil, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from polysilicon.records import Problem

#: Added to the squared length before the root, as the published kernels do.
_EPSILON = 1e-6

#: Tokens of a chunk with decays by channel.
_CHANNEL_CHUNK = 16


def torch_kernel(
    q: Tensor,  # [T, hk, dk]
    k: Tensor,  # [T, hk, dk]
    v: Tensor,  # [T, hv, dv]
    g: Tensor,  # [T, hv] or [T, hv, dk], log of the decay, not positive
    beta: Tensor,  # [T, hv]
    scale: float,
    normalize: bool,  # q and k to unit length first
    chunk: int,  # tokens whose corrections are solved for at once
    state: Tensor,  # float32 [slots, hv, dk, dv]
    query_starts: Tensor,  # int32 [B + 1]
    state_slots: Tensor,  # int32 [B], -1: no state, results zero
    seen: Tensor,  # int32 [B], 0: the state is not read
    max_query: int,
) -> Tensor:  # [T, hv, dv]; zero for padding
    """A triangular system inside a chunk, the state from chunk to chunk; all in float32."""
    out = torch.zeros_like(v)
    for group in groups(query_starts, state_slots, seen):
        parts = [group.read(value).float().transpose(1, 2) for value in (q, k, v, g, beta)]
        if normalize:
            parts[:2] = (_unit(part) for part in parts[:2])
        repeat = v.shape[1] // k.shape[1]
        parts[0] = parts[0] * scale
        parts[:2] = (part.repeat_interleave(repeat, 1) for part in parts[:2])
        held, ys = group.load(state), []
        # Decays by channel come between the numbers of every pair of keys: shorter chunks.
        length = chunk if g.dim() == 2 else min(chunk, _CHANNEL_CHUNK)
        for start in range(0, group.length, length):
            queries, keys, values, decays, betas = (
                part[:, :, start : start + length] for part in parts
            )
            y, held = _chunk(queries, keys, values, decays, betas, held)
            ys.append(y)
        group.write(out, torch.cat(ys, 2).transpose(1, 2))
        state[group.slots] = held
    return out


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _chunk(
    q: Tensor,  # [G, hv, l, dk]
    k: Tensor,
    v: Tensor,  # [G, hv, l, dv]
    g: Tensor,  # [G, hv, l] or [G, hv, l, dk]
    beta: Tensor,  # [G, hv, l]
    state: Tensor,  # [G, hv, dk, dv]
) -> tuple[Tensor, Tensor]:
    if k.shape[2] == 1:
        return _step(q, k, v, g, beta, state)
    decay, beta = g.cumsum(2), beta[..., None]
    keys, queries = _scores(q, k, decay)
    decay = decay if g.dim() == 4 else decay[..., None]
    since = decay.exp()
    # Each correction depends on those before it in the chunk: (1 + lower) u = β (v - what S says).
    wanted = beta * (v - (since * k) @ state)
    u = torch.linalg.solve_triangular(
        (beta * keys).tril(-1), wanted, upper=False, unitriangular=True
    )
    y = (since * q) @ state + queries @ u
    left, whole = (decay[:, :, -1:] - decay).exp(), decay[:, :, -1].exp()[..., None]
    state = whole * state + (k * left).transpose(-1, -2) @ u
    return y, state


def _scores(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """What keys and queries of a chunk say to its keys so far, [G, hv, l, l] each."""
    length = k.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=k.device).triu(1)
    between = decay.unsqueeze(3) - decay.unsqueeze(2)
    if decay.dim() == 4:
        between = between.masked_fill_(later[..., None], -torch.inf).exp_()
        between *= k.unsqueeze(2)  # [G, hv, l, l, dk]
        keys, queries = (between @ x[..., None] for x in (k, q))
        return keys[..., 0], queries[..., 0]
    # Masked before the exponential, which would overflow for what lies ahead.
    between = between.masked_fill_(later, -torch.inf).exp_()
    return k @ k.transpose(-1, -2) * between, q @ k.transpose(-1, -2) * between


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk of one token: the recurrence as it is written, `state` in place."""
    state *= g.exp().transpose(2, 3) if g.dim() == 4 else g.exp()[..., None]
    u = beta[..., None] * (v - k @ state)
    state.addcmul_(k.transpose(-1, -2), u)
    return q @ state, state


def gated_delta_rule_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    normalize: bool,
    chunk: int,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """Shape function of every kernel of this op."""
    return torch.empty_like(v)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    normalize: bool,
    chunk: int,
    state: Tensor,
    query_starts: Tensor,
    state_slots: Tensor,
    seen: Tensor,
    max_query: int,
) -> Tensor:
    """The recurrence in float64, one token at a time."""
    repeat = v.shape[1] // k.shape[1]

    def advance(held: Tensor, token: int) -> tuple[Tensor, Tensor]:
        pair = [x[token].double() for x in (q, k)]
        pair = [_unit(x) for x in pair] if normalize else pair
        query, key = (x.repeat_interleave(repeat, 0)[..., None] for x in pair)
        held = g[token].double().exp().view(len(held), -1, 1) * held
        wrong = v[token].double() - (held * key).sum(1)
        held = held + key * (beta[token].double()[:, None] * wrong)[:, None]
        return held, scale * (held * query).sum(1)

    return walk(v.shape, state, query_starts, state_slots, seen, advance)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source, wide = Source(dtype, device), Source(torch.float32, device, seed=1)

    def sample(name: str, told: str = "", heads: int = 4, shared: int = 2, **given: Any) -> Sample:
        tokens, rest = layout(name, source)
        kwargs: dict[str, Any] = {
            "q": source.normal(tokens, shared, 16),
            "k": source.normal(tokens, shared, 16),
            "v": source.normal(tokens, heads, 8),
            "g": -wide.normal(tokens, heads).exp(),
            "beta": source.normal(tokens, heads).sigmoid(),
            "scale": 0.25,
            "normalize": True,
            "chunk": 16,
            "state": spoil(wide.normal(SLOTS, heads, 16, 8), name),
        }
        return Sample(name=f"{name}{told}", kwargs=kwargs | given | rest)

    for name in MIXTURES:
        yield sample(name)
    yield sample("mixture", ", one head each", heads=2, chunk=64)
    keys = source.normal(layout("mixture", source)[0], 2, 16, magnitude=0.2)
    yield sample("mixture", ", lengths kept", normalize=False, k=keys)
    strong = torch.full((65, 4), -1e3, device=device)
    yield sample("chunk with a past", ", forgets all", g=strong, chunk=64)
    for name in ("decode", "mixture", "chunk with a past"):
        tokens = layout(name, source)[0]
        yield sample(name, ", by channel", g=-wide.normal(tokens, 4, 16).exp())
    yield sample(
        "chunk with a past", ", channels forget all", g=strong[..., None].expand(-1, -1, 16)
    )


def _inputs(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A decode step of the problem's shapes, one token a sequence."""
    source = Source(dtype, device)

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    wide = Source(torch.float32, device, 1)
    key_heads, heads = size("key_heads", 4), size("value_heads", 8)
    width, value = size("head_size", 128), size("v_head_size", 128)
    decays = (tokens, heads, *([width] if problem.fact("by_channel", False) else []))
    return {
        "q": source.normal(tokens, key_heads, width),
        "k": source.normal(tokens, key_heads, width),
        "v": source.normal(tokens, heads, value),
        "g": -wide.normal(*decays).exp(),
        "beta": source.normal(tokens, heads).sigmoid(),
        "scale": width**-0.5,
        # Keys of any length would make the state grow without bound.
        "normalize": True,
        "chunk": size("chunk", 64),
        "state": wide.normal(tokens, heads, width, value),
        **decoding(tokens, device),
    }


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return 64 * (int(kwargs["max_query"]) + int(kwargs["k"].shape[-1]))


OP = Op(
    name="gated_delta_rule",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, bool normalize, "
        "int chunk, Tensor(a!) state, Tensor query_starts, Tensor state_slots, Tensor seen, "
        "SymInt max_query) -> Tensor"
    ),
    keys=frozenset(
        {"key_heads", "value_heads", "head_size", "v_head_size", "normalize", "by_channel", "chunk"}
    ),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_inputs,
    mutates=("state",),
    tokens=len,
    source="https://arxiv.org/abs/2412.06464",
)
