"""The base of every layer: states its problems once, is bound once, then calls plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.records import Problem


class Layer(nn.Module):
    """A module made of ops.

    A subclass names its ops in `problems()` and calls the attributes of the same names, which
    `bind_kernel` sets. A freshly built layer is bound to core's portable PyTorch kernels, so it
    works before `prepare()` and is traceable.
    """

    def problems(self) -> dict[str, Problem]:
        """Attribute name → Problem, for every op that this layer uses."""
        raise NotImplementedError  # each layer states its own

    def bind_kernel(self, attribute: str, kernel: Callable[..., Any]) -> None:
        """Sets the callable that serves `attribute`; called by `prepare()`, never per call."""
        slots = self.problems()
        if attribute not in slots:
            raise ValueError(
                f"{type(self).__name__} has no op slot {attribute!r}: one of {', '.join(slots)}"
            )
        # A plain attribute, not a submodule or buffer: the compiler sees a constant function.
        object.__setattr__(self, attribute, kernel)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as records spell it: `float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def check_vector(owner: str, name: str, tensor: torch.Tensor | None, size: int | None) -> None:
    """Refuses a weight or bias that is not a floating vector of `size` numbers (None: any).

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: not one-dimensional or of another size.
    """
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a floating-point tensor, got {kind_of(tensor)}")
    if tensor.dim() != 1 or (size is not None and tensor.shape[0] != size):
        wanted = f"({size},)" if size is not None else "one dimension"
        raise ValueError(f"{owner}: {name} has shape {tuple(tensor.shape)}, expected {wanted}")


def check_matrix(owner: str, name: str, tensor: torch.Tensor) -> None:
    """Refuses a weight that is not a floating matrix.

    Raises:
        TypeError: not a floating-point tensor (quantised weights need their own layer).
        ValueError: not two-dimensional.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a floating-point tensor, got {kind_of(tensor)}")
    if tensor.dim() != 2:
        raise ValueError(f"{owner}: {name} has shape {tuple(tensor.shape)}, expected [out, in]")


def kind_of(value: object) -> str:
    """What a value is, for error texts: the dtype of a tensor, else its type."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
