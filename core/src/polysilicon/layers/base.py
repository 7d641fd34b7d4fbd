"""The base of every layer: states its problems once, is bound once, then calls plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.records import Problem


class Layer(nn.Module):
    """A module made of ops.

    A subclass names its ops in `problems()` and calls `self.kernels.<op>`-style attributes that
    `bind_kernel` sets. A freshly built layer is bound to core's portable PyTorch kernels, so it
    works before `prepare()` and is traceable.
    """

    def problems(self) -> dict[str, Problem]:
        """Attribute name → Problem, for every op that this layer uses."""
        raise NotImplementedError  # each layer states its own

    def bind_kernel(self, attribute: str, kernel: Callable[..., Any]) -> None:
        """Sets the callable that serves `attribute`; called by `prepare()`, never per call."""
        if attribute not in self.problems():
            raise ValueError(
                f"{type(self).__name__} has no op slot {attribute!r}: "
                f"one of {', '.join(self.problems())}"
            )
        # A plain attribute, not a submodule or buffer: the compiler sees a constant function.
        object.__setattr__(self, attribute, kernel)
