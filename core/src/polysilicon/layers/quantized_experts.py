"""The experts of a mixture whose weights stay as a quantised checkpoint stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon import formats
from polysilicon.layers.base import dtype_name, portable
from polysilicon.layers.quantized_weight import QuantizedLayer, StoredWeight
from polysilicon.ops import activation as activations
from polysilicon.ops.experts import activated
from polysilicon.records import Format, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Names = Mapping[str, str] | str


class QuantizedExperts(QuantizedLayer):
    """Every token through its chosen experts, weighted and summed (arXiv:1701.06538).

    Args:
        tensors: name in the checkpoint → tensor [E, ...]; the layer registers them under these
            names: `state_dict` gives the checkpoint's bytes back.
        format: of both weights, e.g. `mxfp4/group:32`.
        up: which tensors are the weight [E, 2 · I, H] of gate and up, or [E, I, H] without a
            gate: argument of the ops → name, e.g. `{"weight": "gate_up_proj", "scale":
            "gate_up_proj_scale_inv"}`, or what is put before the format's usual names.
        down: the same of the weight [E, H, I].
        biases: names of the biases [E, 2 · I] or [E, I], and [E, H], where there are any.
        activation: any name that Activation takes.
        input_format: the format in which the inputs of both products are multiplied, e.g.
            `fp8_e4m3fn/group:128`; empty for the inputs as they are.
        gated: whether `up` holds a gate.
        interleaved: gate and up alternate along their dim, else the gate is the first half.
        alpha: 0 for activation(gate) · up, else gate · sigmoid(alpha · gate) · (up + 1) (GPT-OSS).
        limit: 0 for none, else gate ≤ limit and -limit ≤ up ≤ limit.
        top_k: experts of a token, for choosing the kernel; None where it is not known.
        in_features: (H, I), needed where the tensors don't tell it.
        dtype: of the activations; follows `.to(dtype)`, the stored tensors don't.

    Raises:
        RecordError: the format isn't known; `fp8` alone is two.
        TypeError, ValueError: a tensor is missing, unknown, or of the wrong dtype or shape.
    """

    moe_permute: Callable[..., tuple[Tensor, Tensor]]
    up_product: Callable[..., Tensor]
    down_product: Callable[..., Tensor]

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        format: str | Format,
        *,
        up: Names = "gate_up_proj_",
        down: Names = "down_proj_",
        biases: tuple[str, str] = ("gate_up_proj_bias", "down_proj_bias"),
        activation: str = "silu",
        input_format: str | Format = "",
        gated: bool = True,
        interleaved: bool = False,
        alpha: float = 0.0,
        limit: float = 0.0,
        top_k: int | None = None,
        in_features: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        stored, given = formats.parse(str(format)), str(input_format)
        given = str(formats.activation(given)) if given else ""
        self.biases = {
            key: name for key, name in zip(("up", "down"), biases, strict=True) if name in tensors
        }
        self.stored = _stored(
            tensors, stored, given, {"up": up, "down": down}, self.biases, in_features
        )
        self.experts = _same_experts(self.stored["up"], self.stored["down"])
        self.activation, self.gated = activations.canonical(activation), gated
        self.interleaved, self.alpha, self.limit = interleaved, float(alpha), float(limit)
        self.top_k = top_k
        _check_sizes(self.stored["up"], self.stored["down"], gated)
        for key, name in self.biases.items():
            _check_bias(name, tensors[name], (self.experts, self.stored[key].rows))
        self.hold(tensors, dtype)
        self.bind_kernel("moe_permute", portable("moe_permute"))
        for product in ("up_product", "down_product"):
            self.bind_kernel(product, portable("quantized_grouped_linear"))

    def problems(self) -> dict[str, Problem]:
        dtype = dtype_name(self.dtype_mark.dtype)
        sorting: dict[str, Any] = {"experts": self.experts}
        if self.top_k is not None:
            sorting["top_k"] = self.top_k
        found = {"moe_permute": Problem(op="moe_permute", dtype=dtype, facts=sorting)}
        for key, weight in self.stored.items():
            facts = weight.facts() | {"experts": self.experts, "bias": key in self.biases}
            found[f"{key}_product"] = Problem(
                op="quantized_grouped_linear", dtype=dtype, facts=facts
            )
        return found

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """[T, H], int64 [T, k] and [T, k] → [T, H] in the dtype of x; index E means no expert."""
        top_k = indices.shape[1]
        order, ends = self.moe_permute(indices, self.experts)
        tokens = order // top_k
        inner = self._product(self.up_product, "up", x[tokens], ends)
        y = self._product(self.down_product, "down", self._activated(inner), ends)
        factors = weights.reshape(-1)[order].float()[:, None]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add(0, tokens, y.float() * factors).to(x.dtype)

    def _product(self, kernel: Callable[..., Tensor], key: str, x: Tensor, ends: Tensor) -> Tensor:
        stored = self.stored[key]
        weight, scale, zeros, g_idx, input_scale = stored.arguments(self).values()
        bias = getattr(self, self.biases[key]) if key in self.biases else None
        format, activation = str(stored.stored), stored.activation
        if not self.rounds:
            activation, kernel = "", portable("quantized_grouped_linear")
        return kernel(x, weight, scale, zeros, g_idx, bias, input_scale, ends, format, activation)

    def _activated(self, x: Tensor) -> Tensor:
        return activated(x, self.activation, self.gated, self.interleaved, self.alpha, self.limit)

    def dense(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The weights [E, 2 · I, H] (or [E, I, H]) and [E, H, I] that the layer stands for."""
        wanted = dtype or self.dtype_mark.dtype
        return self.stored["up"].dense(self, wanted), self.stored["down"].dense(self, wanted)

    def extra_repr(self) -> str:
        up = self.stored["up"]
        given = f", activations={up.activation}" if up.activation else ""
        return f"{self.experts} × {up.columns} → {up.rows}, {self.activation}, {up.stored}{given}"


def _stored(
    tensors: Mapping[str, Tensor],
    stored: Format,
    input_format: str,
    names: Mapping[str, Names],
    biases: Mapping[str, str],
    in_features: tuple[int, int] | None,
) -> dict[str, StoredWeight]:
    own = {key: _own(tensors, named, set(biases.values())) for key, named in names.items()}
    left = set(tensors) - set(biases.values()) - {name for part in own.values() for name in part}
    if left:
        raise ValueError(
            f"QuantizedExperts: {', '.join(sorted(left))} belong neither to up nor to down: say "
            "by up=, down= and biases= which tensors are theirs"
        )
    found = {}
    for index, (key, part) in enumerate(own.items()):
        if not part:
            raise ValueError(
                f"QuantizedExperts: none of {', '.join(sorted(tensors))} is of {key}, which is "
                f"named {names[key]!r}"
            )
        found[key] = StoredWeight(
            "QuantizedExperts",
            stored,
            input_format,
            part,
            names=names[key],
            in_features=None if in_features is None else in_features[index],
            # Not of g_idx: one order of inputs serves all experts.
            experts=max(part.values(), key=Tensor.dim).shape[0],
        )
    return found


def _own(tensors: Mapping[str, Tensor], names: Names, biases: set[str]) -> dict[str, Tensor]:
    def belongs(name: str) -> bool:
        if isinstance(names, str):
            return name.startswith(names) and name not in biases
        return name in names.values()

    return {name: tensor for name, tensor in tensors.items() if belongs(name)}


def _same_experts(up: StoredWeight, down: StoredWeight) -> int:
    if up.experts != down.experts or up.experts is None:
        raise ValueError(
            f"QuantizedExperts: up has {up.experts} experts and down {down.experts}: expected one "
            "number"
        )
    return up.experts


def _check_sizes(up: StoredWeight, down: StoredWeight, gated: bool) -> None:
    inner = up.rows // 2 if gated else up.rows
    if (down.rows, down.columns) != (up.columns, inner):
        raise ValueError(
            f"QuantizedExperts: up is [{up.rows}, {up.columns}] and down [{down.rows}, "
            f"{down.columns}]: expected down to be [{up.columns}, {inner}]"
        )


def _check_bias(name: str, bias: Tensor, shape: tuple[int, int]) -> None:
    if not bias.is_floating_point() or tuple(bias.shape) != shape:
        raise ValueError(
            f"QuantizedExperts: {name} is {bias.dtype} {tuple(bias.shape)}, expected floating "
            f"{shape}"
        )
