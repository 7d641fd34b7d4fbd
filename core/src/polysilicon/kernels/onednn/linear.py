"""linear by oneDNN, whose float32 product does not depend on the maker of the processor.

PyTorch computes float32 products with MKL, which leaves half of the vector width of some x86
processors unused; oneDNN generates code for what the processor has. Both sum in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in]
    bias: Tensor | None,  # [out]
) -> Tensor:
    """x · weightᵀ + bias."""
    return _product(x, weight, bias)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same with the weight as the left operand, for a few tokens.

    The weight's many rows are then what the cores share, and the few tokens stay in the caches.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = _product(weight, rows, None).t().contiguous()
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return F.linear(x, weight, bias)  # oneDNN's call below has no gradient
    if torch.compiler.is_compiling():
        # Inductor takes the call below only with constant weights; ours are the model's own.
        traced: Tensor = torch.ops.polysilicon.onednn_linear(x, weight, bias)
        return traced
    return _call(x, weight, bias)


def _call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Dense operands: other forms are copied or misread below this call.
    y: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight.contiguous(), bias, "none", [], ""
    )
    return y


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# torch.library ships without annotations for these.
_LIBRARY: Any = torch.library.Library("polysilicon", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("onednn_linear", _call, "CPU")
torch.library.register_fake("polysilicon::onednn_linear", _fake, lib=_LIBRARY)
