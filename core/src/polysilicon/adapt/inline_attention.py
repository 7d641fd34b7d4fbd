"""The layer that stands in a method whose own code computed attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from polysilicon.adapt.interface import refuse_training
from polysilicon.errors import AdaptError
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from polysilicon.layers.attention import Attention
    from polysilicon.records import Problem


class Product(NamedTuple):
    """A product of queries and keys that is not computed: `factor * q @ kᵀ + added`."""

    q: Tensor  # [b, h, tq, d] or [b*h, tq, d]
    k: Tensor  # [b, hk, tk, d] or [b*h, tk, d]
    factor: float = 1.0
    added: Tensor | None = None


class Products:
    """What rewritten code calls in the place of PyTorch's products, with their arguments."""

    #: Heads of scores of zero: 1 where the bias is the same for all.
    score_heads: int

    def matmul(self, input: Tensor, other: Tensor) -> Product:
        """Stands for `torch.matmul(q, kᵀ)`."""
        return Product(input, other.transpose(-1, -2))

    def bmm(self, input: Tensor, mat2: Tensor) -> Product:
        """Stands for `torch.bmm(q, kᵀ)`."""
        return Product(input, mat2.transpose(-1, -2))

    def baddbmm(
        self,
        input: Tensor,
        batch1: Tensor,
        batch2: Tensor,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> Product:
        """Stands for `torch.baddbmm(added, q, kᵀ)`."""
        return Product(batch1, batch2.transpose(1, 2), alpha, input * beta)

    def start(self, product: Product) -> Tensor:
        """Scores of a product of zero."""
        q, k, _, added = product
        if added is not None:
            return added.expand(q.shape[0], q.shape[1], k.shape[1])
        leading = q.shape[:-2] if q.dim() == 3 else (q.shape[0], self.score_heads)
        return q.new_zeros(*leading, q.shape[-2], k.shape[-2])


class InlineAttention(Products, Layer):
    """Attention on the terms of rewritten code (see outlining): a product, a bias, values.

    Args:
        attend: attends; its scale holds the product's factor.
        score_heads: heads of the scores of zero that the bias is made of.
    """

    def __init__(self, attend: Attention, score_heads: int) -> None:
        super().__init__()
        self.attend, self.score_heads = attend, score_heads

    def problems(self) -> dict[str, Problem]:
        """None of its own."""
        return {}

    def forward(
        self,
        product: Product,
        bias: Callable[[], Tensor],  # gives [b, 1 or h, tq, tk], or [b*h, tq, tk]
        v: Tensor,  # [b, hk, tk, dv] or [b*h, tk, dv]
    ) -> Tensor:  # [b, h, tq, dv], or [b*h, tq, dv] where v has no heads
        """Attention of the product's queries and keys; in the engine without the bias."""
        refuse_training(self)
        heads = self.attend.num_heads
        q, k, values = (by_head(x, heads).to(v.dtype) for x in (product.q, product.k, v))
        if self.attend.context.batch is None:
            out = self._dense(q, k, values, by_head(bias(), heads))
        else:
            out = self.attend(q, k, values)
        out = out.transpose(1, 2)
        return out if v.dim() == 4 else out.reshape(-1, *out.shape[2:])

    def scaled_dot_product_attention(
        self,
        query: Tensor,  # [b, h, tq, d]
        key: Tensor,  # [b, hk, tk, d]
        value: Tensor,  # [b, hk, tk, dv]
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,  # the scale is the layer's, and heads that share keys are seen from shapes
    ) -> Tensor:  # [b, h, tq, dv]
        """Stands for PyTorch's function of this name."""
        del dropout_p, kwargs
        refuse_training(self)
        if self.attend.context.batch is not None:
            paged: Tensor = self.attend(query, key, value)
            return paged.transpose(1, 2)
        queries = query.shape[2]
        if is_causal and queries < key.shape[2]:
            # Causal means aligned to the first key: nobody sees the others.
            key, value = key[:, :, :queries], value[:, :, :queries]
        return self._dense(query, key, value, attn_mask, is_causal).transpose(1, 2)

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        out, _ = self.attend.attention(q, k, v, mask, self.attend.scale, causal, 0, 0.0, None)
        return out


def by_head(x: Tensor, heads: int) -> Tensor:
    """[b*h, t, d] as [b, h, t, d]."""
    return x if x.dim() == 4 else x.view(-1, heads, *x.shape[1:])


def refuse_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A model's forward whose own code would have returned attention weights."""
    config: Any = module.config
    asked = kwargs.get("output_attentions")
    if config.output_attentions if asked is None else asked:
        raise AdaptError(
            "output_attentions=True was asked of an adapted model, whose attention kernels never "
            "hold the weights: call undo() first, or run the model without adapt()"
        )
