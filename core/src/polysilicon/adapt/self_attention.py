"""The standard attention module in one piece: one product for q, k and v, then ours throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from polysilicon.adapt.interface import (
    refuse_tensors,
    refuse_training,
    refuse_weights,
    run_layer,
)
from polysilicon.layers.base import Layer, dtype_name
from polysilicon.layers.linear import Linear, MergedLinear
from polysilicon.ops import rotary_embedding
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from polysilicon.layers.attention import Attention


@dataclass(frozen=True)
class RotaryForm:
    """How cos and sin come (see RotaryEmbedding's `output`), and whether pairs are interleaved."""

    angles: Literal["duplicated", "repeated", "half"]
    interleaved: bool

    def halves(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """One number a pair, as our op takes them."""
        if self.angles == "duplicated":
            half = cos.shape[-1] // 2
            return cos[..., :half], sin[..., :half]
        if self.angles == "repeated":
            return cos[..., ::2], sin[..., ::2]
        return cos, sin


#: All forms that are tried.
FORMS = (
    RotaryForm("duplicated", interleaved=False),
    RotaryForm("repeated", interleaved=True),
    RotaryForm("duplicated", interleaved=True),
    RotaryForm("half", interleaved=False),
    RotaryForm("half", interleaved=True),
)

#: Where the norms of q and k stand: none, on the whole projection, on each head, or on each head
#: after the rotation.
NormPlace = Literal["none", "projection", "head", "rotated"]


@dataclass(frozen=True)
class Parts:
    """The children of an attention module by their role.

    q, k and v are one linear where the checkpoint has them merged; the output projection is None
    where another module holds it.
    """

    qkv: tuple[Linear, ...]
    out: Linear | None
    norms: tuple[nn.Module, nn.Module] | None


class SelfAttention(Layer):
    """Projection, norms of q and k, rotation, cache, attention and output projection.

    The children stay registered in the model's own module under their names; this layer sits
    beside them and owns the merged product and the bound kernels only.

    Args:
        parts: the adapted children.
        attention: the layer that the interface uses for this module too.
        layer_idx: the module's place in Transformers' cache.
    """

    #: The product that yields q, k and v side by side, and the parts registered elsewhere.
    project: Callable[[Tensor], Tensor]
    out: Linear | None
    norms: tuple[nn.Module, nn.Module] | None
    attend: Attention
    first: Linear
    # Bound callable; prepare() replaces it by what it chose for the device.
    rotary_kernel: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self,
        parts: Parts,
        attention: Attention,
        *,
        rotary: RotaryForm | None,
        norm_place: NormPlace,
        layer_idx: int,
    ) -> None:
        super().__init__()
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        self.heads = heads, kv_heads, kv_heads
        self.sizes = attention.head_dim, attention.head_dim, attention.v_head_dim
        self.widths = [count * size for count, size in zip(self.heads, self.sizes, strict=True)]
        self.rotary, self.norm_place, self.layer_idx = rotary, norm_place, layer_idx
        object.__setattr__(self, "first", parts.qkv[0])
        # Plain attributes: these modules are registered where the model has them.
        for name, value in (("out", parts.out), ("norms", parts.norms), ("attend", attention)):
            object.__setattr__(self, name, value)
        if len(parts.qkv) == 1:
            object.__setattr__(self, "project", parts.qkv[0])
        else:
            self.add_module("project", MergedLinear(parts.qkv))
        if rotary is not None:
            self.bind_kernel("rotary_kernel", rotary_embedding.torch_kernel)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.first.weight.dtype

    def problems(self) -> dict[str, Problem]:
        """The rotation; its other ops belong to the layers that it is made of."""
        if self.rotary is None:
            return {}
        facts = {"head_size": self.sizes[0], "interleaved": self.rotary.interleaved}
        dtype = dtype_name(self.dtype)
        return {"rotary_kernel": Problem(op="rotary_embedding", dtype=dtype, facts=facts)}

    def forward(
        self,
        hidden_states: Tensor,  # [b, t, hidden]
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[b, t, hidden] and None for the weights, which are never held."""
        refuse_training(self)
        refuse_weights(kwargs)
        refuse_tensors(kwargs)
        leading = hidden_states.shape[:-1]
        q, k, v = self._heads(self.project(hidden_states), leading)
        if self.rotary is not None:
            assert position_embeddings is not None
            q, k = self._rotate(self.rotary, q, k, *position_embeddings)
        if self.norm_place == "rotated":
            q, k = self._norm(q, k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            # A decoder that may stand behind an encoder gets the caches of both.
            own = getattr(cache, "self_attention_cache", cache)
            k, v = own.update(k, v, self.layer_idx)
        out = run_layer(self.attend, q, k, v, attention_mask).reshape(*leading, -1)
        return out if self.out is None else self.out(out), None

    def _heads(self, merged: Tensor, leading: torch.Size) -> list[Tensor]:
        """q, k and v as [b, t, heads, size]."""
        parts = list(torch.split(merged, self.widths, dim=-1))
        if self.norm_place == "projection":
            parts[:2] = self._norm(parts[0], parts[1])
        shaped = [
            part.view(*leading, count, size)
            for part, count, size in zip(parts, self.heads, self.sizes, strict=True)
        ]
        if self.norm_place == "head":
            shaped[:2] = self._norm(shaped[0], shaped[1])
        return shaped

    def _norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.norms is not None
        return self.norms[0](q), self.norms[1](k)

    def _rotate(
        self, form: RotaryForm, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = form.halves(cos.unsqueeze(-2), sin.unsqueeze(-2))
        if cos.dtype == q.dtype:
            pair: tuple[Tensor, Tensor] = self.rotary_kernel(q, k, cos, sin, form.interleaved)
            return pair
        # Models that keep the angles in float32 rotate in float32.
        wide = self.rotary_kernel(q.to(cos.dtype), k.to(cos.dtype), cos, sin, form.interleaved)
        return wide[0].to(q.dtype), wide[1].to(k.dtype)

    def extra_repr(self) -> str:
        return f"rotary={self.rotary}, norms={self.norm_place}"
