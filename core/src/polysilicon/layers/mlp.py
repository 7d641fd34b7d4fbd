"""The gated MLP of a decoder block: down(kind(gate(x)) · up(x))."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.layers.activation import GatedActivation
from polysilicon.layers.base import Layer
from polysilicon.layers.linear import Linear, MergedLinear

if TYPE_CHECKING:
    from torch import Tensor

    from polysilicon.records import Problem


class GatedMLP(Layer):
    """down(kind(gate(x)) · up(x)) with gate and up as one product (arXiv:2002.05202).

    Args:
        gate: module with `.weight` [width, hidden] and `.bias`.
        up: module of the same shape.
        down: module with `.weight` [hidden, width] and `.bias`.
        kind: activation of the gate, any name that Activation takes.
        names: attribute names of gate, up and down, which are the parameter names of the model.

    Raises:
        TypeError, ValueError: the three do not fit together; see MergedLinear.
    """

    def __init__(
        self,
        gate: Any,
        up: Any,
        down: Any,
        kind: str,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        width = gate.weight.shape[0]
        if up.weight.shape[0] != width or down.weight.shape[1] != width:
            raise ValueError(
                f"GatedMLP: gate has {width} outputs, up {up.weight.shape[0]}, and down takes "
                f"{down.weight.shape[1]}: they must be equal"
            )
        if len(set(names)) != 3:
            raise ValueError(f"GatedMLP: names {names} must be three different attribute names")
        if not isinstance(down, Linear):
            down = Linear(down.weight, down.bias)
        for name, module in zip(names, (gate, up, down), strict=True):
            self.add_module(name, module)
        self.names = names
        self.gate_up = MergedLinear([gate, up])
        self.gated = GatedActivation(kind, width=width, dtype=gate.weight.dtype)

    def problems(self) -> dict[str, Problem]:
        """None of its own: the layers that it is made of state theirs."""
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., hidden]."""
        y: Tensor = getattr(self, self.names[2])(self.gated(self.gate_up(x)))
        return y
