"""Multi-head latent attention: a token's latent stands for the keys and values of all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon.errors import AdaptError
from polysilicon.layers.attention import PagedContext, allocate_kv_cache
from polysilicon.layers.base import Layer, dtype_name, portable
from polysilicon.ops import attention
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.layers.attention import PagedBatch
    from polysilicon.layers.linear import Linear
    from polysilicon.records import Layout


class LatentAttention(Layer):
    """Attention over latents (DeepSeek-V2, arXiv 2405.04434), after the norm and the rotation.

    A head's key is its part of the projected latent, then the rotated part that all heads share;
    its value is the rest of the projected latent. Outside the engine (`context.batch` is None) keys
    and values are expanded by the projection. Inside, the b = 1 row holds the step's tokens end to
    end, their latents and rotated keys are stored in this layer's cache, and the projection is
    absorbed: queries go to latent space before attention, and what they found leaves it after.

    Args:
        projection: rank → num_heads · (nope_dim + v_head_dim), without bias: each head's key
            without position, then its value. The model's own layer: it is no child of this one,
            so that its weight is listed once.
        num_heads: query heads.
        nope_dim: numbers of a head's query and key that carry no position.
        rope_dim: numbers of them that do.
        v_head_dim: size of a value head.
        scale: factor on the scores.
        causal: whether a query sees only its past, where the caller gives no mask.
        name: the layer's name in its model, for errors.
        context: shared by all attention layers of a model.

    Raises:
        ValueError: the projection has a bias, is stored transposed or has other sizes.
    """

    projection: Linear
    cache: Tensor | None
    # Bound callables; prepare() replaces them by what it chose for the device.
    attention: Callable[..., tuple[Tensor, Tensor]]
    latent_store: Callable[..., None]
    latent_attention: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self,
        projection: Linear,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        v_head_dim: int,
        *,
        scale: float,
        causal: bool = True,
        name: str = "",
        context: PagedContext | None = None,
    ) -> None:
        super().__init__()
        _check_projection(name, projection, num_heads * (nope_dim + v_head_dim))
        self.num_heads, self.rank = num_heads, projection.in_features
        self.nope_dim, self.rope_dim, self.v_head_dim = nope_dim, rope_dim, v_head_dim
        self.scale, self.causal, self.name = scale, causal, name
        self.context = PagedContext() if context is None else context
        # Plain attributes: the cache is the engine's and the projection the model's.
        object.__setattr__(self, "projection", projection)
        self.detach_cache()
        self.bind_kernel("attention", attention.torch_kernel)
        for op in ("latent_store", "latent_attention"):
            self.bind_kernel(op, portable(op))

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, and of the cache."""
        return self.projection.weight.dtype

    def problems(self) -> dict[str, Problem]:
        """The three op slots; block_size is known once a cache is attached."""
        paged = {} if self.cache is None else {"block_size": self.cache.shape[1]}
        latent = {"rank": self.rank, "rope": self.rope_dim} | paged
        rule = {"heads": self.num_heads, "causal": self.causal}
        expanded = {
            "kv_heads": self.num_heads,
            "head_size": self.nope_dim + self.rope_dim,
            "v_head_size": self.v_head_dim,
            "window": 0,
            "softcap": False,
            "sinks": False,
        }
        facts = {
            "attention": rule | expanded,
            "latent_store": latent,
            "latent_attention": rule | latent,
        }
        dtype = dtype_name(self.dtype)
        return {op: Problem(op=op, dtype=dtype, facts=own) for op, own in facts.items()}

    def cache_bytes(self, block_size: int) -> int:
        """Bytes of one block of the cache."""
        return (self.rank + self.rope_dim) * self.dtype.itemsize * block_size

    def attach_cache(self, cache: Tensor) -> None:
        """Gives the layer its cache, [blocks, block_size, rank + rope_dim]."""
        if cache.dim() != 3 or cache.shape[2] != self.rank + self.rope_dim:
            raise ValueError(
                f"latent attention {self.name!r} was given a cache of shape {tuple(cache.shape)}: "
                f"expected [blocks, block_size, {self.rank + self.rope_dim}]"
            )
        object.__setattr__(self, "cache", cache)

    def allocate_cache(
        self,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        layout: Layout | None = None,
    ) -> None:
        """Makes a cache of the layer's dtype and attaches it; a layout's heads are one."""
        sizes = (num_blocks, block_size, 1, self.rank + self.rope_dim, 0)
        cache, _ = allocate_kv_cache(*sizes, dtype=self.dtype, device=device, layout=layout)
        self.attach_cache(cache[:, :, 0])

    def detach_cache(self) -> None:
        """Drops the cache; the layer then works outside the engine only."""
        object.__setattr__(self, "cache", None)

    def forward(
        self,
        q: Tensor,  # [b, num_heads, tq, nope_dim + rope_dim]
        latent: Tensor,  # [b, tk, rank]
        rotary: Tensor,  # [b, tk, rope_dim]
        mask: Tensor | None = None,  # as Transformers makes it: bool or additive
    ) -> Tensor:  # [b, tq, num_heads, v_head_dim]
        """Attention by the shared context's step if there is one, else over expanded keys."""
        batch = self.context.batch
        if batch is not None:
            return self._paged(q, latent, rotary, batch)
        return self.attend(q, *self._expand(latent, rotary), mask)

    def attend(
        self,
        q: Tensor,  # [b, num_heads, tq, nope_dim + rope_dim]
        k: Tensor,  # [b, num_heads, tk, nope_dim + rope_dim]
        v: Tensor,  # [b, num_heads, tk, v_head_dim]
        mask: Tensor | None = None,
    ) -> Tensor:  # [b, tq, num_heads, v_head_dim]
        """Attention over keys and values that the caller expanded, outside the engine."""
        causal = self.causal and mask is None
        out, _ = self.attention(q, k, v, mask, self.scale, causal, 0, 0.0, None)
        return out

    def _expand(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.projection(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        nope, values = torch.split(heads, [self.nope_dim, self.v_head_dim], -1)
        shared = rotary[:, None].expand(-1, self.num_heads, -1, -1)
        return torch.cat((nope, shared), -1), values

    def _paged(self, q: Tensor, latent: Tensor, rotary: Tensor, batch: PagedBatch) -> Tensor:
        tokens, cache = batch.slots.shape[0], self.cache
        if cache is None:
            raise AdaptError(
                f"latent attention {self.name!r} has no cache: call attach_cache() on every "
                "attention layer before a paged step"
            )
        if q.shape[0] != 1 or q.shape[2] != tokens or latent.shape[:2] != (1, tokens):
            raise AdaptError(
                f"latent attention {self.name!r} got queries {tuple(q.shape)} and latents "
                f"{tuple(latent.shape)} in a paged step of {tokens} tokens: expected batch 1 with "
                "all tokens in one row"
            )
        self.latent_store(latent[0], rotary[0], cache, batch.slots)
        heads = self.projection.weight.view(self.num_heads, -1, self.rank)
        keys, values = torch.split(heads, [self.nope_dim, self.v_head_dim], 1)  # W_UK and W_UV
        nope, turned = torch.split(q[0], [self.nope_dim, self.rope_dim], -1)
        found, _ = self.latent_attention(
            torch.cat((torch.matmul(nope, keys), turned), -1).transpose(0, 1),
            cache,
            batch.block_tables,
            batch.query_starts,
            batch.kv_lengths,
            self.rank,
            self.scale,
            self.causal,
            batch.query_bound,
            batch.block_tables.shape[1] * cache.shape[1],
        )
        out = torch.matmul(found.transpose(0, 1), values.transpose(1, 2))  # [h, T, v_head_dim]
        return out.transpose(0, 1)[None]

    def extra_repr(self) -> str:
        """What tells two layers apart."""
        head = f"{self.nope_dim}+{self.rope_dim}"
        return f"heads={self.num_heads}, rank={self.rank}, head={head}, v_head={self.v_head_dim}"


def _check_projection(name: str, projection: Linear, width: int) -> None:
    if projection.bias is not None or projection.transposed or projection.out_features != width:
        raise ValueError(
            f"latent attention {name!r} was given a projection ({projection.extra_repr()}"
            f"{', transposed' if projection.transposed else ''}): expected rank → {width}, each "
            "head's key without position and its value, stored [out, in] without bias"
        )
