"""Normalisation layers; each takes an existing Parameter and keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysilicon.layers.base import Layer, check_vector, dtype_name
from polysilicon.ops import add_rms_norm, layer_norm, rms_norm, rms_norm_gated
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable


class _Norm(Layer):
    """What the norms share: a weight or none, eps, offset, and the size of the last dim."""

    weight: nn.Parameter | Tensor | None
    dtype_mark: Tensor

    def __init__(
        self,
        weight: nn.Parameter | Tensor | None,
        eps: float,
        offset: float,
        hidden: int | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if not eps >= 0:
            raise ValueError(f"{owner}: eps is {eps}, expected a number >= 0")
        if weight is None and hidden is None:
            raise ValueError(f"{owner}: without a weight, say the size of the last dim (hidden=…)")
        check_vector(owner, "weight", weight, hidden)
        self.eps = float(eps)
        self.offset = float(offset)
        self.hidden = int(weight.shape[0]) if weight is not None else int(hidden or 0)
        self.weight = weight
        if weight is None:
            # Follows .to(dtype), so that problems() states the model's dtype; never saved.
            self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations this norm is meant for."""
        return self.dtype_mark.dtype if self.weight is None else self.weight.dtype

    def _problem(self, op: str, **facts: str | float | bool | None) -> Problem:
        common = {
            "hidden": self.hidden,
            "eps": self.eps,
            "offset": self.offset,
            "weight": self.weight is not None,
        }
        return Problem(op=op, dtype=dtype_name(self.dtype), facts={**common, **facts})

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"{self.hidden}, eps={self.eps}{offset}"


class RMSNorm(_Norm):
    """Root-mean-square norm of the last dim (arXiv:1910.07467).

    Args:
        weight: [hidden], or None for a norm without scale.
        eps: added to the mean square.
        offset: added to the weight; 1 is Gemma's form.
        hidden: size of the last dim, needed only without a weight.
        dtype: of the activations, needed only without a weight.

    Raises:
        TypeError, ValueError: the weight is not a floating vector, eps is negative or NaN.
    """

    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]

    def __init__(
        self,
        weight: nn.Parameter | Tensor | None,
        eps: float,
        offset: float = 0.0,
        *,
        hidden: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weight, eps, offset, hidden, dtype)
        self.bind_kernel("rms_norm", rms_norm.torch_kernel)
        self.bind_kernel("add_rms_norm", add_rms_norm.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        return {
            "rms_norm": self._problem("rms_norm"),
            "add_rms_norm": self._problem("add_rms_norm"),
        }

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → the same shape and dtype."""
        y: Tensor = self.rms_norm(x, self.weight, self.eps, self.offset)
        return y

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        pair: tuple[Tensor, Tensor] = self.add_rms_norm(
            x, residual, self.weight, self.eps, self.offset
        )
        return pair


class GatedRMSNorm(_Norm):
    """RMS norm with a SiLU gate, in groups of channels (Mamba2, arXiv:2405.21060).

    Args:
        weight: [hidden], or None.
        eps: added to the mean square.
        offset: added to the weight.
        norm_before_gate: True for norm(x)·silu(gate), False for norm(x·silu(gate)).
        group_size: channels that are normalised together; 0 for all.
        hidden: size of the last dim, needed only without a weight.
        dtype: of the activations, needed only without a weight.

    Raises:
        TypeError, ValueError: as RMSNorm; or the groups do not divide the last dim.
    """

    rms_norm_gated: Callable[..., Any]

    def __init__(
        self,
        weight: nn.Parameter | Tensor | None,
        eps: float,
        offset: float = 0.0,
        norm_before_gate: bool = False,
        group_size: int = 0,
        *,
        hidden: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weight, eps, offset, hidden, dtype)
        if group_size < 0 or (group_size and self.hidden % group_size):
            raise ValueError(
                f"GatedRMSNorm: group_size {group_size} does not divide the last dim "
                f"({self.hidden}): use a divisor, or 0 for one group"
            )
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size
        self.bind_kernel("rms_norm_gated", rms_norm_gated.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        facts = {"norm_before_gate": self.norm_before_gate, "group_size": self.group_size}
        return {"rms_norm_gated": self._problem("rms_norm_gated", **facts)}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., hidden] → the same shape, in the dtype of x."""
        y: Tensor = self.rms_norm_gated(
            x, gate, self.weight, self.eps, self.offset, self.norm_before_gate, self.group_size
        )
        return y


class LayerNorm(_Norm):
    """Layer norm of the last dim (arXiv:1607.06450).

    Args:
        weight: [hidden], or None.
        bias: [hidden], or None.
        eps: added to the variance.
        offset: added to the weight; 1 is the form of Nemotron's norm.
        hidden: size of the last dim, needed only without a weight.
        dtype: of the activations, needed only without a weight.

    Raises:
        TypeError, ValueError: as RMSNorm; or the bias does not fit the weight.
    """

    layer_norm: Callable[..., Any]
    bias: nn.Parameter | Tensor | None

    def __init__(
        self,
        weight: nn.Parameter | Tensor | None,
        bias: nn.Parameter | Tensor | None,
        eps: float,
        offset: float = 0.0,
        *,
        hidden: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if weight is None and hidden is None and bias is not None:
            hidden = bias.shape[0]
        super().__init__(weight, eps, offset, hidden, dtype)
        check_vector("LayerNorm", "bias", bias, self.hidden)
        self.bias = bias
        self.bind_kernel("layer_norm", layer_norm.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        return {"layer_norm": self._problem("layer_norm", bias=self.bias is not None)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → the same shape and dtype."""
        y: Tensor = self.layer_norm(x, self.weight, self.bias, self.eps, self.offset)
        return y
