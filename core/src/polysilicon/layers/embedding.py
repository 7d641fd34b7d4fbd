"""Token and position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.layers.base import Layer, check_matrix, dtype_name
from polysilicon.ops import embedding
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


class Embedding(Layer):
    """Rows of a table by id, times a scale.

    Args:
        weight: [vocabulary, hidden].
        scale: factor of every row; Gemma's is sqrt(hidden).
        offset: added to the ids before the look-up; OPT's learned positions start at row 2.

    Raises:
        TypeError, ValueError: the weight is not a floating matrix, the offset is negative.
    """

    embedding: Callable[..., Any]
    weight: nn.Parameter | Tensor

    def __init__(self, weight: nn.Parameter | Tensor, scale: float = 1.0, offset: int = 0) -> None:
        super().__init__()
        check_matrix("Embedding", "weight", weight)
        if not 0 <= offset < max(1, weight.shape[0]):
            raise ValueError(
                f"Embedding: offset {offset} lies outside the table of {weight.shape[0]} rows"
            )
        self.weight = weight
        self.scale = float(scale)
        self.offset = int(offset)
        self.bind_kernel("embedding", embedding.torch_kernel)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table (nn.Embedding's name for it, which model code reads)."""
        return int(self.weight.shape[0])

    @property
    def embedding_dim(self) -> int:
        """Size of one row."""
        return int(self.weight.shape[1])

    def problems(self) -> dict[str, Problem]:
        facts = {
            "vocabulary": self.num_embeddings,
            "hidden": self.embedding_dim,
            "scale": self.scale,
        }
        dtype = dtype_name(self.weight.dtype)
        return {"embedding": Problem(op="embedding", dtype=dtype, facts=facts)}

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] → [..., hidden] in the dtype of the weight."""
        rows: Tensor = self.embedding(
            ids + self.offset if self.offset else ids, self.weight, self.scale
        )
        return rows

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, scale={self.scale:g}"
