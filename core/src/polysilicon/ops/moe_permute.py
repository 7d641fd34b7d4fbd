"""moe_permute: the choices of all tokens sorted by expert, and where each expert's end.

T tokens choose k of E experts each. Sorting is stable, so an expert sees tokens in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.records import Problem


def reference(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The definition, one expert after the other."""
    flat = indices.reshape(-1).tolist()
    order = [place for expert in range(experts + 1) for place in _places(flat, expert)]
    ends = [sum(chosen <= expert for chosen in flat) for expert in range(experts)]
    return torch.tensor(order, device=indices.device), torch.tensor(ends, device=indices.device)


def _places(flat: list[int], expert: int) -> list[int]:
    return [place for place, chosen in enumerate(flat) if chosen == expert]


def torch_kernel(
    indices: Tensor,  # int64 [T, k], 0 to E - 1; E: no expert
    experts: int,  # E
) -> tuple[Tensor, Tensor]:  # int64 [T · k], int32 [E]
    """Places in `indices` by expert, those without one last, and each expert's end among them.

    Raises:
        ValueError: an expert that doesn't exist was chosen.
    """
    flat = indices.reshape(-1)
    if flat.numel():
        low, high = (int(number) for number in torch.aminmax(flat))
        if low < 0 or high > experts:
            raise ValueError(
                f"expert {low if low < 0 else high} was chosen for a token: there are {experts}, "
                f"numbered from 0 ({experts} itself means none); check the router's indices"
            )
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    return flat.argsort(stable=True), counts.cumsum(0).to(torch.int32)


def moe_permute_fake(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Shape function of every kernel of this op."""
    return indices.new_empty(indices.numel()), indices.new_empty(experts, dtype=torch.int32)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for tokens in TOKENS:
        indices = source.integers(5, tokens, 2)
        yield Sample(name=f"tokens {tokens}", kwargs={"indices": indices, "experts": 5})
    for experts, top_k in ((1, 1), (64, 6), (512, 10)):
        indices = source.integers(experts, 13, top_k)
        yield Sample(name=f"{top_k} of {experts}", kwargs={"indices": indices, "experts": experts})
    indices = source.integers(6, 7, 3)  # 5 among them
    yield Sample(name="some without expert", kwargs={"indices": indices, "experts": 5})
    yield Sample(name="strided", kwargs={"indices": indices[:, ::2], "experts": 5})
    yield Sample(name="all to none", kwargs={"indices": 0 * indices + 5, "experts": 5})


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments of moe_permute for `tokens` tokens."""
    experts, top_k = int(problem.fact("experts") or 8), int(problem.fact("top_k") or 2)
    indices = Source(dtype, device).integers(experts, tokens, top_k)
    return {"indices": indices, "experts": experts}


OP = Op(
    name="moe_permute",
    schema="(Tensor indices, int experts) -> (Tensor, Tensor)",
    keys=frozenset({"experts", "top_k"}),
    reference=reference,
    samples=_samples,
    tokens=len,
    inputs=_problem_call,
    results=("int64", "int32"),
    source="https://arxiv.org/abs/1701.06538",
)
