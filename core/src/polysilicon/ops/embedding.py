"""embedding: rows of a table by id, times a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from polysilicon.ops import problem_inputs
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import MAGNITUDES, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def reference(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """weight[ids] · scale in float64."""
    return weight.double()[ids] * scale


def torch_kernel(
    ids: Tensor,  # int64 [...]
    weight: Tensor,  # [vocabulary, hidden]
    scale: float = 1.0,
) -> Tensor:
    """[..., hidden] in the dtype of `weight`."""
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for tokens in (0, 1, 7, 17):
        for hidden in (1, 31, 64):
            kwargs: dict[str, Tensor | float] = {
                "ids": source.integers(13, tokens),
                "weight": source.normal(13, hidden),
            }
            yield Sample(name=f"tokens {tokens} hidden {hidden}", kwargs=kwargs)
    ids = source.integers(13, 2, 5)
    for magnitude in MAGNITUDES:
        weight = source.normal(13, 16, magnitude=magnitude)
        kwargs = {"ids": ids, "weight": weight, "scale": 8.0}
        yield Sample(name=f"magnitude {magnitude}", kwargs=kwargs)
    weight = source.normal(26, 16)[::2]
    kwargs = {"ids": ids[:1].expand(3, -1), "weight": weight, "scale": 25.3}
    yield Sample(name="strided rows, expanded ids, odd scale", kwargs=kwargs)


OP = Op(
    name="embedding",
    schema="(Tensor ids, Tensor weight, float scale=1.0) -> Tensor",
    keys=frozenset({"vocabulary", "hidden", "scale"}),
    reference=reference,
    samples=_samples,
    tokens=torch.numel,
    inputs=problem_inputs.embedding,
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.embedding.html",
)
