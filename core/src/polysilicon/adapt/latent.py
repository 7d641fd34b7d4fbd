"""Attention whose keys and values one linear expands from latents: the engine caches the latents.

The module's own code stays. Outside the engine it expands as before, so that Transformers' caches
go on working. In the engine the linear hands the latents to the attention layer instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polysilicon.adapt.probe import Unverified
from polysilicon.layers.latent_attention import LatentAttention
from polysilicon.layers.linear import Linear

if TYPE_CHECKING:
    from polysilicon.adapt.interface import AttentionCall
    from polysilicon.adapt.recording import ModuleCall
    from polysilicon.adapt.surgery import Surgery
    from polysilicon.layers.attention import Attention, PagedContext


class LatentProjection(Linear):
    """From latents to keys and values; in a step of the engine it notes the latents instead.

    What it then returns are zeros without memory: of the keys that the module makes of them, only
    the rotated part is read.
    """

    def __init__(self, weight: nn.Parameter | Tensor, context: PagedContext) -> None:
        super().__init__(weight)
        self.context = context
        self.noted: list[Tensor] = []

    def weights(self, attribute: str) -> dict[str, tuple[Tensor, ...]]:
        """None: the absorbed form reads the weight by heads, so it lies plain."""
        del attribute
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., rank] → [..., num_heads · (nope_dim + v_head_dim)]."""
        if self.context.batch is None:
            return super().forward(x)
        self.noted.clear()
        self.noted.append(x)
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)


class ExpandedCall(nn.Module):
    """Latent attention on the terms of Transformers' interface: with keys and values."""

    def __init__(self, layer: LatentAttention, projection: LatentProjection) -> None:
        super().__init__()
        self.layer = layer
        self.causal = layer.causal
        self.noted = projection.noted

    def forward(
        self,
        q: Tensor,  # [b, num_heads, tq, nope_dim + rope_dim]
        k: Tensor,  # [b, num_heads, tk, nope_dim + rope_dim]
        v: Tensor,  # [b, num_heads, tk, v_head_dim]
        mask: Tensor | None,
    ) -> Tensor:  # [b, tq, num_heads, v_head_dim]
        """Over the keys and values as they are; in the engine over this step's latents."""
        layer = self.layer
        if layer.context.batch is None:
            return layer.attend(q, k, v, mask)
        latent = self.noted.pop().reshape(k.shape[0], -1, layer.rank)
        out: Tensor = layer(q, latent, k[:, 0, :, layer.nope_dim :], mask)
        return out


def attend_to_latents(
    module: nn.Module, layer: Attention, seen: ModuleCall, attended: AttentionCall, surgery: Surgery
) -> tuple[LatentAttention, ExpandedCall] | None:
    """The layer over latents for one over heads; the module's linear notes them from then on.

    Args:
        module: calls the interface once a forward; its children are adapted.
        layer: attention by heads, proved for it.
        seen: a recorded call of it.
        attended: what it passed to the interface in that call.
        surgery: of the model.

    Returns:
        The layer and what is called in its place; None where nothing is expanded from latents.

    Raises:
        Unverified: it is, but the layer cannot stand for it.
    """
    found = _expansion(seen, attended)
    if found is None:
        return None
    child, nope = found
    part = surgery.replacements.get(child, child)
    names = [name for name, held in module._modules.items() if held is part]
    if not isinstance(part, Linear) or len(names) != 1:
        raise Unverified(f"the projection of its latents is a {type(part).__name__}")
    if part.bias is not None or part.transposed:
        raise Unverified("the projection of its latents has a bias or is stored transposed")
    if layer.num_heads != layer.num_kv_heads or layer.window or layer.softcap:
        raise Unverified("its heads share keys, or it has a window or a softcap")
    if layer.sinks is not None:
        raise Unverified("it has sinks")
    rope = layer.head_dim - nope
    if part.in_features + rope >= layer.num_heads * (layer.head_dim + layer.v_head_dim):
        raise Unverified("its latents take more than its keys and values")
    projection = LatentProjection(part.weight, layer.context)
    latent = LatentAttention(
        projection,
        layer.num_heads,
        nope,
        rope,
        layer.v_head_dim,
        scale=layer.scale,
        causal=layer.causal,
        name=layer.name,
        context=layer.context,
    )
    surgery.replace(module, names[0], projection)
    return latent, ExpandedCall(latent, projection)


def _expansion(seen: ModuleCall, attended: AttentionCall) -> tuple[nn.Module, int] | None:
    """The child that gave the keys and values of all heads, and how much of each key it gave.

    To the bit: a head's key is its first numbers there, then a rest that all heads share; its value
    is the numbers after those.
    """
    key, value = attended.key, attended.value
    batch, heads, tokens, head_dim = key.shape
    for child, inner in seen.children:
        output = inner.output
        if not isinstance(output, Tensor) or output.shape[-1] % heads:
            continue
        size = output.shape[-1] // heads
        nope = size - value.shape[3]
        if not 0 < nope < head_dim or output.numel() != batch * tokens * heads * size:
            continue
        expanded = output.reshape(batch, tokens, heads, size).transpose(1, 2)
        shared = key[..., nope:]
        if (
            torch.equal(key[..., :nope], expanded[..., :nope])
            and torch.equal(value, expanded[..., nope:])
            and torch.equal(shared, shared[:, :1].expand_as(shared))
        ):
            return child, nope
    return None
