"""Turns chosen kernels into what a layer calls: the function itself, or a choice by token count."""

from __future__ import annotations

import hashlib
import importlib
from typing import TYPE_CHECKING, Any

from polysilicon import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from polysilicon.ops.contract import Op
    from polysilicon.records import Kernel

    Call = Callable[..., Any]

#: Equal cut lists share one opaque op, whoever binds them: name → (function, fake).
_cut_ops: dict[str, tuple[Call, Call]] = {}


def load_target(target: str) -> Call:
    """What `package.module:attribute` names."""
    module, _, attribute = target.partition(":")
    found: Call = getattr(importlib.import_module(module), attribute)
    return found


def load_kernel(kernel: Kernel) -> Call:
    """Imports a kernel's target; an opaque one comes back as its torch.library op.

    What the kernel takes packed it gets as physical tensors here; `takes_packed` makes of it what
    takes `Packed`s.
    """
    function = load_target(kernel.target)
    if kernel.form == "traceable":
        return function
    from polysilicon.opaque import register_opaque

    assert kernel.fake is not None  # the record refuses an opaque kernel without one
    schema = ops.get(kernel.op).physical_schema(kernel.layouts)
    return register_opaque(kernel.op, kernel.name, schema, function, load_target(kernel.fake))


def takes_packed(op: Op, name: str, layouts: Mapping[str, str], function: Call) -> Call:
    """A kernel's or cut list's callable with the op's signature, `Packed`s where it takes them.

    Where it takes everything plain it is returned as it is: nothing is added to a call.
    """
    if not layouts:
        return function
    from polysilicon.packed import accepting

    accepted: Call = accepting(name, op.arguments, layouts, function)
    return accepted


def callable_for(op: Op, cuts: Sequence[tuple[int, Kernel, Call]]) -> Call:
    """What serves these (highest token count, kernel, its callable), rising.

    One kernel is its own callable: nothing is added to a call. Several are a choice by token
    count, which the compiler traces; if any of them is opaque, one opaque op holds the choice.
    All of them take the same arguments in the same layouts; `bind()` sees to that.
    """
    names = " / ".join(kernel.name for _, kernel, _ in cuts)
    return takes_packed(op, names, cuts[0][1].layouts, _in_one(op, cuts))


def _in_one(op: Op, cuts: Sequence[tuple[int, Kernel, Call]]) -> Call:
    if len(cuts) == 1:
        return cuts[0][2]
    opaque = [kernel for _, kernel, _ in cuts if kernel.form == "opaque"]
    if not opaque:
        return _by_tokens(op, [(highest, function) for highest, _, function in cuts])
    from polysilicon.opaque import register_opaque

    text = " ".join(f"{highest}:{kernel.name}:{kernel.target}" for highest, kernel, _ in cuts)
    name = f"{op.name}.cuts_{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if name not in _cut_ops:
        functions = [(highest, _shapes_by_name(op, kernel)) for highest, kernel, _ in cuts]
        _cut_ops[name] = (_by_tokens(op, functions), load_target(str(opaque[0].fake)))
    function, fake = _cut_ops[name]
    schema = op.physical_schema(opaque[0].layouts)
    return register_opaque(op.name, name, schema, function, fake)


def _shapes_by_name(op: Op, kernel: Kernel) -> Call:
    """A kernel's function for the dispatcher, which passes all by position, shapes too."""
    function, own = load_target(kernel.target), len(op.arguments)
    names = tuple(f"{argument}_shape" for argument in kernel.layouts)
    if not names:
        return function

    def call(*args: Any) -> Any:
        return function(*args[:own], **dict(zip(names, args[own:], strict=True)))

    return call


def _by_tokens(op: Op, cuts: Sequence[tuple[int, Call]]) -> Call:
    *bounded, (_, last) = cuts
    limits = tuple(bounded)
    tokens = op.tokens
    first = op.schema.lstrip("(").split(",")[0].split(")")[0].split()[-1]

    def choose(*args: Any, **kwargs: Any) -> Any:
        count = tokens(args[0] if args else kwargs[first])
        for highest, function in limits:
            if count <= highest:
                return function(*args, **kwargs)
        return last(*args, **kwargs)

    return choose
