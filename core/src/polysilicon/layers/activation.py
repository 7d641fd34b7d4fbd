"""Activation layers: elementwise functions, and the gated pair of a GLU MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.layers.base import Layer, dtype_name
from polysilicon.ops import activation, gelu_and_mul, silu_and_mul
from polysilicon.ops.activation import canonical
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable


class Activation(Layer):
    """One elementwise function, by any spelling that model configs use.

    Raises:
        ValueError: the kind is not known.
    """

    activation: Callable[..., Any]
    dtype_mark: Tensor

    def __init__(self, kind: str, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.kind = canonical(kind)
        # Follows .to(dtype), so that problems() states the model's dtype; never saved.
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        self.bind_kernel("activation", activation.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"activation": Problem(op="activation", dtype=dtype, facts={"kind": self.kind})}

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        y: Tensor = self.activation(x, self.kind)
        return y

    def extra_repr(self) -> str:
        return self.kind


#: Kinds whose product with the other half is an op of its own: kind → (op, its arguments).
_GATED_OPS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "silu": ("silu_and_mul", ()),
    "gelu": ("gelu_and_mul", ("none",)),
    "gelu_tanh": ("gelu_and_mul", ("tanh",)),
}


class GatedActivation(Layer):
    """kind(first half) · second half of the last dim (arXiv:2002.05202).

    Args:
        kind: any name that Activation takes; silu and gelu have ops of their own.
        width: size of one half, for choosing the kernel; None where it is not known.

    Raises:
        ValueError: the kind is not known.
    """

    gate_kernel: Callable[..., Any]
    dtype_mark: Tensor

    def __init__(
        self, kind: str, *, width: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.kind = canonical(kind)
        self.width = width
        self.op, self.arguments = _GATED_OPS.get(self.kind, ("activation", (self.kind,)))
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        module = {
            "silu_and_mul": silu_and_mul,
            "gelu_and_mul": gelu_and_mul,
            "activation": activation,
        }
        self.bind_kernel("gate_kernel", module[self.op].torch_kernel)

    def problems(self) -> dict[str, Problem]:
        facts: dict[str, str | int] = {} if self.width is None else {"width": self.width}
        if self.op == "gelu_and_mul":
            facts["approximate"] = self.arguments[0]
        elif self.op == "activation":
            facts["kind"] = self.kind
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"gate_kernel": Problem(op=self.op, dtype=dtype, facts=facts)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 · width] → [..., width] in the dtype of `x`."""
        if self.op == "activation":
            gate, up = x.chunk(2, dim=-1)
            y: Tensor = self.gate_kernel(gate, self.kind) * up
        else:
            y = self.gate_kernel(x, *self.arguments)
        return y

    def extra_repr(self) -> str:
        return self.kind
