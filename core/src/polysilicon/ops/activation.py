"""activation: the elementwise functions that language models use, by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import FORMS, MAGNITUDES, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Mean and width of the Laplace cell, constants of Ma et al., arXiv:2209.10655, equation 12.
_LAPLACE_MEAN = 0.707107
_LAPLACE_WIDTH = 0.282095


def _laplace(x: Tensor) -> Tensor:
    scaled = (x.float() - _LAPLACE_MEAN) / (_LAPLACE_WIDTH * math.sqrt(2))
    # erfc keeps the digits of the lower tail that 1 + erf loses.
    return (0.5 * torch.erfc(-scaled)).to(x.dtype)


def _quick_gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def _sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x.float()).sqrt().to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


#: Kind → function. The names are this project's; `ALIASES` maps other spellings to them.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": torch.clone,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_clipped_10": lambda x: F.gelu(x).clamp_(-10, 10),
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square_(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "laplace": _laplace,
    "softplus": F.softplus,
    "sqrt_softplus": _sqrt_softplus,
    "elu": F.elu,
}

#: Spellings of the same functions in model configs.
ALIASES: dict[str, str] = {
    "linear": "identity",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_10": "gelu_clipped_10",
    "swish": "silu",
    "sqrtsoftplus": "sqrt_softplus",
}

_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": lambda x: x * _normal_cdf(x),
    "gelu_tanh": lambda x: x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2,
    "gelu_clipped_10": lambda x: (x * _normal_cdf(x)).clamp(-10, 10),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "mish": lambda x: x * torch.logaddexp(x, torch.zeros_like(x)).tanh(),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "relu6": lambda x: x.clamp(0, 6),
    "leaky_relu": lambda x: torch.where(x >= 0, x, 0.01 * x),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1),
    "laplace": lambda x: _normal_cdf((x - _LAPLACE_MEAN) / _LAPLACE_WIDTH),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "sqrt_softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)).sqrt(),
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x.clamp(max=0))),
}


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2))


def canonical(kind: str) -> str:
    """This project's name of an activation.

    Raises:
        ValueError: no such elementwise, parameter-free activation.
    """
    name = ALIASES.get(kind, kind)
    if name not in KINDS:
        raise ValueError(
            f"activation {kind!r} is not known: one of {', '.join(sorted((*KINDS, *ALIASES)))}"
        )
    return name


def reference(x: Tensor, kind: str) -> Tensor:
    """The function in float64, from its textbook form."""
    return _REFERENCES[canonical(kind)](x.double())


def torch_kernel(x: Tensor, kind: str) -> Tensor:
    """The function of every element, in the shape and dtype of `x`."""
    return KINDS[ALIASES.get(kind, kind)](x)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for kind in KINDS:
        for magnitude in MAGNITUDES:
            x = source.normal(3, 67, magnitude=magnitude)
            yield Sample(name=f"{kind} {magnitude}", kwargs={"x": x, "kind": kind})
    for tokens in (0, 1):
        x = source.normal(tokens, 64)
        yield Sample(name=f"tokens {tokens}", kwargs={"x": x, "kind": "silu"})
    for name, form in FORMS.items():
        x = form(source.normal(5, 33))
        yield Sample(name=name, kwargs={"x": x, "kind": "quick_gelu"})


OP = Op(
    name="activation",
    schema="(Tensor x, str kind) -> Tensor",
    keys=frozenset({"kind", "width"}),
    reference=reference,
    samples=_samples,
    source="https://arxiv.org/abs/1606.08415",
)
