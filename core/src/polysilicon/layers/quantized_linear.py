"""A linear layer whose weight stays as a quantised checkpoint stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysilicon import formats
from polysilicon.layers.base import check_vector, dtype_name
from polysilicon.layers.quantized_weight import QuantizedLayer, StoredWeight
from polysilicon.ops import quantized_linear
from polysilicon.records import Format, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class QuantizedLinear(QuantizedLayer):
    """x · Wᵀ + bias, W as `polysilicon.formats` reads it.

    Args:
        tensors: name in the checkpoint → tensor, e.g. qweight, qzeros, scales, g_idx. The layer
            registers them under these names: `state_dict` gives the checkpoint's bytes back.
        format: of the weight, e.g. `int4.gptq/group:128` or a Format.
        bias: [out], or None.
        activation: the format in which x is multiplied, e.g. `fp8_e4m3fn/token`; empty for x as
            it is.
        in_features: needed where the tensors don't tell it (compressed-tensors without
            `weight_shape`).
        dtype: of the activations; follows `.to(dtype)`, the stored tensors don't.

    Raises:
        RecordError: the format isn't known; `fp8` alone is two.
        TypeError, ValueError: a tensor is missing, unknown, or of the wrong dtype or shape.
    """

    quantized_linear: Callable[..., Any]
    bias: nn.Parameter | Tensor | None

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        format: str | Format,
        *,
        bias: nn.Parameter | Tensor | None = None,
        activation: str | Format = "",
        in_features: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        stored, given = formats.parse(str(format)), str(activation)
        given = str(formats.activation(given)) if given else ""
        weight = StoredWeight("QuantizedLinear", stored, given, tensors, in_features=in_features)
        check_vector("QuantizedLinear", "bias", bias, weight.rows)
        self.stored = {"weight": weight}
        self.hold(tensors, dtype)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.register_tensor("bias", bias)
        self.bind_kernel("quantized_linear", quantized_linear.torch_kernel)

    @property
    def in_features(self) -> int:
        """Size of the last dim of the input."""
        return self.stored["weight"].columns

    @property
    def out_features(self) -> int:
        """Size of the last dim of the output."""
        return self.stored["weight"].rows

    @property
    def format(self) -> Format:
        """The format of the weight."""
        return self.stored["weight"].stored

    def problems(self) -> dict[str, Problem]:
        facts = self.stored["weight"].facts() | {"bias": self.bias is not None}
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"quantized_linear": Problem(op="quantized_linear", dtype=dtype, facts=facts)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out] in the dtype of `x`."""
        stored = self.stored["weight"]
        weight, scale, zeros, g_idx, input_scale = stored.arguments(self).values()
        format, activation, kernel = str(stored.stored), stored.activation, self.quantized_linear
        if not self.rounds:
            activation, kernel = "", quantized_linear.torch_kernel
        y: Tensor = kernel(
            x, weight, scale, zeros, g_idx, self.bias, input_scale, format, activation
        )
        return y

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [out, in] that the layer stands for, in the layer's dtype unless given."""
        return self.stored["weight"].dense(self, dtype or self.dtype_mark.dtype)

    def extra_repr(self) -> str:
        given = f", activation={self.stored['weight'].activation}"
        bias = self.bias is not None
        return f"{self.in_features} → {self.out_features}, {self.format}{given}, bias={bias}"
