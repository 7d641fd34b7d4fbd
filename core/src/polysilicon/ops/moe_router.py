"""moe_router: which experts each token goes to, and with which weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.records import Problem

#: Scorings that choose by the logits themselves, the correction added, and score only those chosen.
AFTER = {"softmax_after": "softmax", "sigmoid_after": "sigmoid"}

#: How logits become scores.
SCORINGS = ("softmax", "sigmoid", "sqrt_softplus", *AFTER)

#: What keeps a sum of weights that is zero from dividing, as the models have it.
_LEAST = 1e-20


def torch_kernel(
    logits: Tensor,  # [T, experts]
    bias: Tensor | None,  # [experts], for the choice only
    top_k: int,
    scoring: str,
    groups: int,  # 1: none
    top_groups: int,
    group_top: int,  # a group's score is the sum of so many of its best
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # float32 [T, top_k], int64 [T, top_k]
    """The weights and the experts of every token, the best first; all of it in float32."""
    own = scores(logits.float(), scoring)
    choice = own if bias is None else own + bias
    if groups > 1:
        grouped = choice.view(*choice.shape[:-1], groups, -1)
        best = grouped.topk(group_top, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        choice = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    indices = choice.topk(top_k, dim=-1).indices
    weights = own.gather(-1, indices)
    if scoring in AFTER:
        weights = scores(weights, AFTER[scoring])
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
    return weights * scale, indices


def reference(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    groups: int,
    top_groups: int,
    group_top: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The definition in float64, one token at a time, by sorting."""
    weights, indices = [], []
    for row in logits.double():
        each = scores(row, scoring)
        choice = each if bias is None else each + bias.double()
        size = len(row) // groups
        parts = [choice[g * size : (g + 1) * size].sort(descending=True)[0] for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -float(parts[g][:group_top].sum()))[:top_groups]
        allowed = [e for e in range(len(row)) if groups == 1 or e // size in best]
        picked = sorted(allowed, key=lambda e: -float(choice[e]))[:top_k]
        own = each[picked]
        if scoring in AFTER:
            own = scores(own, AFTER[scoring])
        if renormalize:
            own = own / (own.sum() + _LEAST)
        weights.append(own * scale)
        indices.append(torch.tensor(picked))
    if not weights:
        return logits.new_zeros(0, top_k).double(), logits.new_zeros(0, top_k).long()
    return torch.stack(weights), torch.stack(indices).to(logits.device)


def scores(logits: Tensor, scoring: str) -> Tensor:
    """The scores by which experts are chosen, in the dtype of the logits.

    Raises:
        ValueError: there is no such scoring.
    """
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    if scoring == "sqrt_softplus":
        return F.softplus(logits).sqrt()
    if scoring in AFTER:
        return logits
    raise ValueError(f"scoring is {scoring!r}: expected one of {', '.join(SCORINGS)}")


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def sample(name: str, tokens: int, experts: int, top_k: int, **given: Any) -> Sample:
        # Numbers a quarter apart, shuffled: in no dtype do two experts tie.
        steps = torch.argsort(source.normal(tokens, experts).float(), -1)
        usual: dict[str, Any] = {
            "logits": ((steps - experts / 2) / 4).to(dtype),
            "bias": None,
            "top_k": top_k,
            "scoring": "softmax",
            "groups": 1,
            "top_groups": 1,
            "group_top": 1,
            "renormalize": False,
            "scale": 1.0,
        }
        return Sample(name=name, kwargs=usual | given)

    for tokens in TOKENS:
        yield sample(f"tokens {tokens}", tokens, 8, 2, renormalize=True)
    for scoring in SCORINGS:
        yield sample(scoring, 5, 12, 3, scoring=scoring, scale=2.5)
    for experts, top_k in ((1, 1), (7, 7), (31, 5)):
        yield sample(f"{top_k} of {experts}", 3, experts, top_k, renormalize=True)
    groups = {"groups": 4, "top_groups": 2, "renormalize": True, "scoring": "sigmoid"}
    # One irrational step each, so that no sum of two scores ties with another.
    bias = torch.arange(16, device=device, dtype=torch.float32).mul(2**0.5).sin()
    yield sample("groups by the best two", 6, 16, 4, group_top=2, bias=bias, **groups)
    yield sample("groups by the best", 6, 16, 4, group_top=1, bias=bias, **groups)
    yield sample("bias for the choice", 6, 16, 4, scoring="sigmoid", bias=bias)
    yield sample("bias of logits", 6, 16, 4, scoring="sigmoid_after", bias=bias, renormalize=True)


def _inputs(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A call with the problem's shapes: logits apart, so that rounding changes no choice."""
    source, experts = Source(dtype, device), int(problem.fact("experts") or 64)
    groups = int(problem.fact("groups") or 1)
    steps = torch.argsort(source.normal(tokens, experts).float(), -1)
    return {
        "logits": ((steps - experts / 2) / 4).to(dtype),
        "bias": torch.zeros(experts, device=device) if problem.fact("bias", False) else None,
        "top_k": int(problem.fact("top_k") or 2),
        "scoring": str(problem.fact("scoring") or "softmax"),
        "groups": groups,
        # Enough open groups for any number of choices: how many are open is no fact.
        "top_groups": groups,
        "group_top": 1,
        "renormalize": bool(problem.fact("renormalize", True)),
        "scale": 1.0,
    }


OP = Op(
    name="moe_router",
    schema=(
        "(Tensor logits, Tensor? bias, int top_k, str scoring, int groups, int top_groups, "
        "int group_top, bool renormalize, float scale) -> (Tensor, Tensor)"
    ),
    keys=frozenset({"experts", "top_k", "scoring", "groups", "renormalize", "bias"}),
    reference=reference,
    samples=_samples,
    inputs=_inputs,
    results=("float32", "int64"),
    source="https://arxiv.org/abs/2412.19437",
)
