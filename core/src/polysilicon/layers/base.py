"""The base of every layer: states its problems once, is bound once, then calls plain attributes."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysilicon.calling import load_kernel
from polysilicon.errors import LayoutError
from polysilicon.notices import notice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from polysilicon.records import Layout, Problem


class Layer(nn.Module):
    """A module made of ops.

    A subclass names its ops in `problems()` and calls the attributes of the same names, which
    `bind_kernel` sets. A freshly built layer is bound to core's portable PyTorch kernels, so it
    works before `prepare()` and is traceable.
    """

    def problems(self) -> dict[str, Problem]:
        """Attribute name → Problem, for every op that this layer uses."""
        raise NotImplementedError  # each layer states its own

    #: Op slot → dtypes that its kernel takes; slots that take any are not in it.
    _kernel_dtypes: Mapping[str, frozenset[str]] = MappingProxyType({})

    def bind_kernel(
        self, attribute: str, kernel: Callable[..., Any], dtypes: frozenset[str] = frozenset()
    ) -> None:
        """Sets the callable that serves `attribute`; called by `prepare()`, never per call.

        Args:
            attribute: the op slot.
            kernel: a callable with the op's signature.
            dtypes: those that it takes, by torch's names; empty means any.
        """
        slots = self.problems()
        if attribute not in slots:
            raise ValueError(
                f"{type(self).__name__} has no op slot {attribute!r}: one of {', '.join(slots)}"
            )
        # A plain attribute, not a submodule or buffer: the compiler sees a constant function.
        object.__setattr__(self, attribute, kernel)
        others = {slot: own for slot, own in self._kernel_dtypes.items() if slot != attribute}
        self._kernel_dtypes = others | ({attribute: dtypes} if dtypes else {})

    def register_tensor(self, name: str, tensor: Tensor) -> None:
        """Registers a Parameter as what it is, and any other tensor as a buffer."""
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)

    def weights(self, attribute: str) -> dict[str, tuple[Tensor, ...]]:
        """Argument → the tensors whose rows it is, for what this layer can hold packed.

        An argument of the op that is not named stays plain.
        """
        del attribute
        return {}

    def lay_out(self, attribute: str, layouts: Mapping[str, Layout]) -> None:
        """Packs what `weights` names into these layouts, and makes the rest of it plain.

        Called by `prepare()` beside `bind_kernel`; arguments that are not named are plain.
        """
        assert not layouts, f"{type(self).__name__} named no weights for {attribute}"

    def unpack(self) -> None:
        """Makes every weight of this layer plain again, served by core's portable kernels."""

    def bind_portable(self) -> None:
        """Binds every op slot to core's portable kernel, as in a freshly built layer."""
        for attribute, problem in self.problems().items():
            self.bind_kernel(attribute, portable(problem.op))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._leave_kernels()
        return self

    def _leave_kernels(self) -> None:
        """Goes back to core's portable kernel where the layer now has a dtype that one refuses."""
        if not self._kernel_dtypes:
            return
        for attribute, problem in self.problems().items():
            taken = self._kernel_dtypes.get(attribute)
            if taken and problem.dtype not in taken:
                self.bind_kernel(attribute, portable(problem.op))
                notice_moved(problem.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # Kernels belong to this process: a pickled layer is unprepared where it is loaded.
        left_out = {*self.problems(), "_kernel_dtypes"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.bind_portable()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for attribute in self.problems():
            if attribute in vars(self):
                dtypes = self._kernel_dtypes.get(attribute, frozenset())
                twin.bind_kernel(attribute, vars(self)[attribute], dtypes)
        return twin


def portable(op: str) -> Any:
    """Core's portable PyTorch kernel of an op; as a torch.library op where it can't be traced."""
    from polysilicon.defaults import KERNELS  # late: the records need no layers

    return load_kernel(next(kernel for kernel in KERNELS if kernel.name == f"{op}.torch"))


def notice_moved(where: object) -> None:
    """Says once that layers left the kernels that `prepare()` bound; `where` they are now."""
    notice(
        f"layers were moved to {where}, for which prepare() chose neither their kernels nor how "
        "their weights lie: core's portable kernels serve them and their weights are plain; call "
        "prepare() again to choose kernels for it",
        LayoutError,
    )


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
