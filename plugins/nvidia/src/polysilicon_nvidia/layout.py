"""How weights lie in memory for NVIDIA's matrix units, where that is not as torch has them.

A KV cache needs no packing: its layouts are orders of dims (plugin.py), and kernels take strides.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.api import Tiled

#: `torch._scaled_mm` and `F.scaled_mm` take fp8 operands whose rows are whole 16-byte units.
SCALED_MM = 16
#: One scale serves a block of 128 × 128 weights (DeepSeek's checkpoints, cuBLAS, DeepGEMM).
SCALE_BLOCK = 128


@functools.cache
def _padded(multiple: int) -> Tiled:
    """N, K with K contiguous: what a matmul by `weight.t()` reads as a K-major operand."""
    from polysilicon.api import Tiled

    return Tiled(dims=("N", "K"), tiles={"N": multiple, "K": multiple}, blocked=False)


def _bytes(x: Tensor) -> Tensor:
    """One-byte formats as plain bytes: torch copies, pads and compares those on every device."""
    import torch

    return x.view(torch.uint8) if x.element_size() == 1 else x


def pack_scaled_mm(weight: Tensor) -> Tensor:  # [N, K] → [N up to 16s, K up to 16s]
    """The weight, zeros appended, as `torch._scaled_mm(x, packed.t())` takes it."""
    return _padded(SCALED_MM).pack(_bytes(weight)).view(weight.dtype)


def unpack_scaled_mm(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The weight of `shape` that `pack_scaled_mm` was given."""
    return _padded(SCALED_MM).unpack(_bytes(packed), shape).view(packed.dtype)


def pack_scale_blocks(weight: Tensor) -> Tensor:  # [N, K] → [N up to 128s, K up to 128s]
    """The weight, zeros appended, so that each of its float32 scales serves a whole block."""
    return _padded(SCALE_BLOCK).pack(_bytes(weight)).view(weight.dtype)


def unpack_scale_blocks(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The weight of `shape` that `pack_scale_blocks` was given."""
    return _padded(SCALE_BLOCK).unpack(_bytes(packed), shape).view(packed.dtype)
