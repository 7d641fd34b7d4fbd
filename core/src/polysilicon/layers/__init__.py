"""The layers: modules made of ops, each bound once to the kernels of a device."""

from polysilicon.layers.activation import Activation, GatedActivation
from polysilicon.layers.attention import Attention, PagedBatch, PagedContext, allocate_kv_cache
from polysilicon.layers.base import Layer
from polysilicon.layers.embedding import Embedding
from polysilicon.layers.experts import Experts
from polysilicon.layers.linear import Linear, MergedLinear
from polysilicon.layers.lm_head import LMHead
from polysilicon.layers.mlp import GatedMLP
from polysilicon.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm
from polysilicon.layers.quantized_experts import QuantizedExperts
from polysilicon.layers.quantized_linear import QuantizedLinear
from polysilicon.layers.rotary import RotaryEmbedding
from polysilicon.layers.router import Router

__all__ = [
    "Activation",
    "Attention",
    "Embedding",
    "Experts",
    "GatedActivation",
    "GatedMLP",
    "GatedRMSNorm",
    "LMHead",
    "Layer",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "PagedBatch",
    "PagedContext",
    "QuantizedExperts",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "Router",
    "allocate_kv_cache",
]
