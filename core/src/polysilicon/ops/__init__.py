"""The ops. `get("rms_norm")` imports one op's contract; nothing here imports torch by itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polysilicon.ops.contract import Op

#: Every op of core, one module each, in the order in which listings show them.
NAMES: tuple[str, ...] = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_gated",
    "layer_norm",
    "rotary_cos_sin",
    "rotary_embedding",
    "activation",
    "silu_and_mul",
    "gelu_and_mul",
    "linear",
    "embedding",
    "lm_head",
    "moe_router",
    "experts",
    "causal_conv1d",
    "ssd",
    "selective_scan",
    "gated_delta_rule",
    "kv_store",
    "paged_attention",
    "attention",
    "latent_store",
    "latent_attention",
    "sampling",
    "quantize",
    "dequantize",
    "quantized_linear",
    "quantized_grouped_linear",
    "moe_permute",
    "rms_norm_quant",
    "silu_and_mul_quant",
)


def get(name: str) -> Op:
    """The contract of one op.

    Raises:
        ValueError: there is no op of that name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no op {name!r}: one of {', '.join(NAMES)}")
    op: Op = importlib.import_module(f"polysilicon.ops.{name}").OP
    return op
