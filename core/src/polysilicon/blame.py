"""Names the kernel that raised, from a traceback and the table; costs nothing until one has."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from polysilicon.calling import load_target
from polysilicon.errors import KernelError, PolysiliconError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType

    from polysilicon.records import Device, Kernel, Provided
    from polysilicon.selection import Binding


def kernel_failed(error: BaseException, bindings: Iterable[Binding]) -> KernelError | None:
    """The error to raise where a bound kernel raised `error`; None where no kernel is in its trace.

    The engine's runner wraps a model's forward with it: nothing per call, no lookup until
    something has failed.
    """
    if isinstance(error, PolysiliconError):
        return None
    owners: dict[CodeType, tuple[Provided[Kernel], Device]] = {}
    for binding in bindings:
        for _, choice in binding.cuts:
            code = _code(load_target(choice.kernel.target))
            if code is not None:
                owners[code] = (choice.provided, binding.device)
    trace, found = error.__traceback__, None
    while trace is not None:
        found = owners.get(trace.tb_frame.f_code, found)
        trace = trace.tb_next
    if found is None:
        return None
    provided, device = found
    name = provided.record.name
    return KernelError(
        f"kernel {name} ({provided.origin}) raised on {device.name}: {type(error).__name__}: "
        f"{error}. To run without it: POLYSILICON_DISABLE_KERNELS={name}"
    )


def _code(function: Callable[..., Any]) -> CodeType | None:
    plain = inspect.unwrap(function)
    return plain.__code__ if inspect.isfunction(plain) else None
