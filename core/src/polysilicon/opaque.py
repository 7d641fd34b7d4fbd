"""Opaque kernels as torch.library ops: one op per kernel, `polysilicon::<op>__<kernel>`.

Made with `Library.define` and `impl`, which cost a fraction of `custom_op` per call. Inference
only: an op has no gradient, so a forward that would need one raises instead of losing it.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.errors import KernelError, SelectionError

if TYPE_CHECKING:
    from collections.abc import Callable

# torch.library ships without annotations for these.
_library: Any = torch.library.Library("polysilicon", "FRAGMENT")  # type: ignore[no-untyped-call]
_registered: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {}


def op_name(op: str, kernel: str) -> str:
    """`rms_norm`, `rms_norm.acme_fast` → `rms_norm__acme_fast`."""
    return f"{op}__{re.sub(r'[^A-Za-z0-9_]', '_', kernel.removeprefix(op + '.'))}"


def register_opaque(
    op: str, kernel: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Defines `polysilicon::<op>__<kernel>` and returns its overload; the same again if it exists.

    Args:
        op: name of the op.
        kernel: the kernel's name.
        schema: torch.library schema without the name, e.g. `(Tensor x, float eps) -> Tensor`.
        function: what computes it, on every device.
        fake: what computes only the results' shapes and dtypes.

    Raises:
        SelectionError: another function has that name already; a compiled graph may hold it.
    """
    name = op_name(op, kernel)
    if name in _registered:
        known, known_fake, overload = _registered[name]
        if (known, known_fake) != (function, fake):
            raise SelectionError(
                f"polysilicon::{name} is already defined by {_place(known)}, and "
                f"{_place(function)} wants the name: rename the kernel"
            )
        return overload  # type: ignore[no-any-return]
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _inference_only(function, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"polysilicon::{name}", _inference_only(fake, name), lib=_library)
    overload = getattr(torch.ops.polysilicon, name).default
    _registered[name] = (function, fake, overload)
    return overload  # type: ignore[no-any-return]


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _inference_only(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with a check that no gradient is asked of it.

    Checked here and not in an autograd kernel: that would cost a second pass through the
    dispatcher wherever gradients are merely off. While tracing, the fake sees the gradient mode.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_gradient(name, (*args, *kwargs.values()))
        return function(*args, **kwargs)

    return functools.wraps(function)(_with_arguments_of(function, name) or checked)


def _with_arguments_of(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """The same check with the function's own arguments, None where it has unusual ones.

    Packing and unpacking `*args` costs a tenth of a whole op call; as `dataclasses` do, write out
    the arguments instead.
    """
    parameters = inspect.signature(function).parameters.values()
    usual = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    if any(parameter.kind not in usual for parameter in parameters):
        return None
    names = ", ".join(parameter.name for parameter in parameters)
    # The dispatcher passes all by position, also what the function takes by keyword alone.
    passed = ", ".join(
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters
    )
    defaults = tuple(p.default for p in parameters if p.default is not p.empty)
    source = (
        f"def checked({names}):\n"
        f"    if _grad_enabled():\n"
        f"        _refuse(_name, ({names},))\n"
        f"    return _function({passed})\n"
    )
    scope: dict[str, Any] = {
        "_grad_enabled": torch.is_grad_enabled,
        "_refuse": _refuse_gradient,
        "_name": name,
        "_function": function,
    }
    exec(source, scope)
    written: Any = scope["checked"]
    written.__defaults__ = defaults
    return written  # type: ignore[no-any-return]


def _refuse_gradient(name: str, arguments: tuple[Any, ...]) -> None:
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments):
        raise KernelError(
            f"polysilicon::{name} has no gradient and was called with a tensor that requires one: "
            "it is for inference, call the model under torch.inference_mode() or torch.no_grad()"
        )
