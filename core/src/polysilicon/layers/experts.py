"""The experts of a mixture: one MLP each, their weights stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polysilicon.layers.base import Layer, dtype_name, kind_of, portable
from polysilicon.ops.activation import canonical
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable


class Experts(Layer):
    """Every token through its chosen experts, weighted and summed (arXiv:1701.06538).

    Args:
        up: [E, 2 · I, H] gate and up, or [E, I, H] without a gate; the last two dims exchanged
            when `transposed`.
        down: [E, H, I]; the last two dims exchanged when `transposed`.
        up_bias: [E, 2 · I] or [E, I], or None.
        down_bias: [E, H], or None.
        activation: any name that Activation takes.
        gated: whether `up` holds a gate.
        interleaved: gate and up alternate along their dim, else the gate is the first half.
        alpha: 0 for activation(gate) · up, else gate · sigmoid(alpha · gate) · (up + 1) (GPT-OSS).
        limit: 0 for none, else gate ≤ limit and -limit ≤ up ≤ limit.
        transposed: see `up`.
        identities: so many experts beyond those of `down` give their token back as it is
            (LongCat-Flash, arXiv:2509.01322); `up` may hold rows for them, which are not read.
        top_k: experts of a token, for choosing the kernel; None where it is not known.
        names: parameter names of up, down and their biases, which are those of the model.

    Raises:
        TypeError, ValueError: a tensor of the wrong kind or shape.
    """

    experts: Callable[..., Any]

    def __init__(
        self,
        up: nn.Parameter | Tensor,
        down: nn.Parameter | Tensor,
        up_bias: nn.Parameter | Tensor | None = None,
        down_bias: nn.Parameter | Tensor | None = None,
        *,
        activation: str = "silu",
        gated: bool = True,
        interleaved: bool = False,
        alpha: float = 0.0,
        limit: float = 0.0,
        transposed: bool = False,
        identities: int = 0,
        top_k: int | None = None,
        names: tuple[str, str, str, str] = ("up", "down", "up_bias", "down_bias"),
    ) -> None:
        super().__init__()
        if identities < 0:
            raise ValueError(f"Experts: identities is {identities}, expected 0 or more")
        _check(up, down, up_bias, down_bias, gated, transposed, identities)
        self.names = names
        for name, tensor in zip(names, (up, down, up_bias, down_bias), strict=True):
            if tensor is not None:
                self.register_tensor(name, tensor)
        self.activation, self.gated, self.interleaved = canonical(activation), gated, interleaved
        self.alpha, self.limit, self.transposed = float(alpha), float(limit), transposed
        self.identities, self.top_k = identities, top_k
        self.bind_kernel("experts", portable("experts"))

    def _stacked(self) -> tuple[Tensor, Tensor]:
        up, down = getattr(self, self.names[0]), getattr(self, self.names[1])
        if self.identities:
            up = up[: len(down)]
        return (up.transpose(1, 2), down.transpose(1, 2)) if self.transposed else (up, down)

    def problems(self) -> dict[str, Problem]:
        _, down = self._stacked()
        number, hidden, width = down.shape
        facts: dict[str, Any] = {
            "experts": number,
            "hidden": hidden,
            "width": width,
            "activation": self.activation,
            "gated": self.gated,
            "bias": getattr(self, self.names[2], None) is not None,
        }
        if self.top_k is not None:
            facts["top_k"] = self.top_k
        return {"experts": Problem(op="experts", dtype=dtype_name(down.dtype), facts=facts)}

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """[T, H], int64 [T, k] and [T, k] → [T, H] in the dtype of x.

        Of E stacked experts, indices from E on are the identities; the index after them means no
        expert.
        """
        up, down = self._stacked()
        number = len(down)
        y: Tensor = self.experts(
            x,
            indices.clamp(max=number) if self.identities else indices,
            weights,
            up,
            getattr(self, self.names[2], None),
            down,
            getattr(self, self.names[3], None),
            self.activation,
            self.gated,
            self.interleaved,
            self.alpha,
            self.limit,
        )
        if not self.identities:
            return y
        same = (indices >= number) & (indices < number + self.identities)
        share = (weights.float() * same).sum(-1, keepdim=True)
        return (y.float() + share * x.float()).to(x.dtype)

    def extra_repr(self) -> str:
        number, hidden, width = self._stacked()[1].shape
        return f"{number} × {hidden} → {width}, {self.activation}"


def _check(
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gated: bool,
    transposed: bool,
    identities: int,
) -> None:
    for name, tensor in (("up", up), ("down", down)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() != 3:
            raise TypeError(
                f"Experts: {name} must be a floating-point tensor [E, out, in], got "
                f"{kind_of(tensor)} {tuple(getattr(tensor, 'shape', ()))}"
            )
    rows, columns = (2, 1) if transposed else (1, 2)
    number, hidden, width = up.shape[0], up.shape[columns], up.shape[rows]
    if identities and number == down.shape[0] + identities:
        number = down.shape[0]
    inner = width // 2 if gated else width
    if (down.shape[0], down.shape[rows], down.shape[columns]) != (number, hidden, inner):
        raise ValueError(
            f"Experts: up is {tuple(up.shape)} and down {tuple(down.shape)}: expected down to "
            f"take {inner} numbers of each of {number} experts and to give {hidden}"
        )
    for name, bias, size in (("up_bias", up_bias, width), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (number, size):
            raise ValueError(
                f"Experts: {name} has shape {tuple(bias.shape)}, expected ({number}, {size})"
            )
