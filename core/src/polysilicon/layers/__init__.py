"""The layers: modules made of ops, each bound once to the kernels of a device."""

from polysilicon.layers.activation import Activation, GatedActivation
from polysilicon.layers.attention import Attention, PagedBatch, PagedContext, allocate_kv_cache
from polysilicon.layers.base import Layer
from polysilicon.layers.causal_conv1d import CausalConv1d
from polysilicon.layers.embedding import Embedding
from polysilicon.layers.experts import Experts
from polysilicon.layers.gated_delta_rule import GatedDeltaRule
from polysilicon.layers.latent_attention import LatentAttention
from polysilicon.layers.linear import Linear, MergedLinear
from polysilicon.layers.lm_head import LMHead
from polysilicon.layers.mlp import GatedMLP
from polysilicon.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm
from polysilicon.layers.quantized_experts import QuantizedExperts
from polysilicon.layers.quantized_linear import QuantizedLinear
from polysilicon.layers.rotary import RotaryEmbedding
from polysilicon.layers.router import Router
from polysilicon.layers.selective_scan import SelectiveScan
from polysilicon.layers.state_space import StateSpace

__all__ = [
    "Activation",
    "Attention",
    "CausalConv1d",
    "Embedding",
    "Experts",
    "GatedActivation",
    "GatedDeltaRule",
    "GatedMLP",
    "GatedRMSNorm",
    "LMHead",
    "LatentAttention",
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
    "SelectiveScan",
    "StateSpace",
    "allocate_kv_cache",
]
