"""Functions that turn queries and keys by given angles, and our layer in their place."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt.probe import (
    MAGNITUDES,
    Inputs,
    Unverified,
    first_verified,
    generator,
    verify,
)
from polysilicon.adapt.self_attention import FORMS, RotaryForm
from polysilicon.errors import AdaptError
from polysilicon.layers.base import Layer, dtype_name
from polysilicon.ops import rotary_embedding
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polysilicon.adapt.recording import ModuleCall


@dataclass(frozen=True)
class Roles:
    """Which argument of a rotary function is what.

    Attributes:
        turned: names of the tensors to turn: q and k, or one.
        cos: name of the cosines.
        sin: name of the sines; the same where one complex tensor holds both.
        rest: the other arguments, with the values for which the function was proved.
    """

    turned: tuple[str, ...]
    cos: str
    sin: str
    rest: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class RotationForm:
    """How the function lays things out.

    Attributes:
        rotary: form of the angles and of the pairs.
        axis: where cos and sin lack the dimension of the heads; None where they have it.
        split: pairs come interleaved and leave as two halves.
        backward: it turns by the negative angle.
        narrow: angles in a wider dtype than x's are used so, but the result is cast back.
    """

    rotary: RotaryForm
    axis: int | None
    split: bool
    backward: bool
    narrow: bool


class Rotation(Layer):
    """Stands for a rotary function: takes its arguments, gives its result.

    Args:
        signature: of the function.
        roles: which argument is what.
        form: how they are laid out.
        head_size: last dimension of what is turned.
        dtype: in which it is turned.
    """

    dtype_mark: Tensor
    rotary_kernel: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self,
        signature: inspect.Signature,
        roles: Roles,
        form: RotationForm,
        *,
        head_size: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.arguments = tuple(signature.parameters)
        self.roles, self.form = roles, form
        self.head_size = head_size
        # Follows the model when that is moved to another dtype.
        self.register_buffer("dtype_mark", torch.empty(0, dtype=dtype), persistent=False)
        self.bind_kernel("rotary_kernel", rotary_embedding.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        """The rotation."""
        facts = {"head_size": self.head_size, "interleaved": self.form.rotary.interleaved}
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"rotary_kernel": Problem(op="rotary_embedding", dtype=dtype, facts=facts)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns: the turned q and k, or the one turned tensor."""
        given = dict(zip(self.arguments, args, strict=False))
        given.update(kwargs)
        for name, value in self.roles.rest:
            if given.get(name, value) != value:
                raise AdaptError(
                    f"the rotary function was given {name}={given[name]!r}, but was proved for "
                    f"{value!r} only: call undo() to use the model this way"
                )
        axis, (cos, sin) = self.form.axis, self._angles(given)
        turned = [given[name] for name in self.roles.turned]
        first = turned[0]
        if len(turned) == 2:
            return self._turn(first, turned[1], cos, sin)
        # The op turns a pair: one head goes twice.
        other = first if axis is None else first.narrow(axis, 0, 1)
        return self._turn(first, other, cos, sin)[0]

    def _angles(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """One number a pair, broadcast over the heads."""
        form, cos, sin = self.form, given[self.roles.cos], given[self.roles.sin]
        if cos.is_complex():
            cos, sin = cos.real, sin.imag
        if form.axis is not None:
            cos, sin = cos.unsqueeze(form.axis), sin.unsqueeze(form.axis)
        cos, sin = form.rotary.halves(cos, sin)
        return cos, -sin if form.backward else sin

    def _turn(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        narrow = q.dtype
        if self.form.split:
            q, k = _split_pairs(q), _split_pairs(k)
        if cos.dtype != q.dtype:
            wide = torch.promote_types(cos.dtype, q.dtype)
            q, k, cos, sin = q.to(wide), k.to(wide), cos.to(wide), sin.to(wide)
        q, k = self.rotary_kernel(q, k, cos, sin, self.form.rotary.interleaved)
        return (q.to(narrow), k.to(narrow)) if self.form.narrow else (q, k)

    def extra_repr(self) -> str:
        return f"{self.head_size}, {self.form}"


def _split_pairs(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def recognise_rotation(
    function: Callable[..., Any], calls: list[ModuleCall]
) -> tuple[Rotation, float]:
    """Our layer that computes what `function` did in the recorded calls, and the error.

    Raises:
        Unverified: it is called in different ways, or is no rotation that our op computes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise Unverified("its signature cannot be told") from error
    every = list(_all_roles(signature, calls))
    probes = list(_probes(signature, every[0], calls)) if every else []
    attempts = [
        partial(_attempt, function, signature, roles, form, probes)
        for roles in every
        for form in _forms(probes[0], roles)
    ]
    return first_verified(attempts, "it does not take tensors to turn and angles")


#: Values that can be compared from call to call.
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)


def _all_roles(signature: inspect.Signature, calls: list[ModuleCall]) -> Iterator[Roles]:
    """The ways to read the arguments: what is turned first, then cos and sin or sin and cos."""
    found = [_bound(signature, one) for one in calls]
    tensors = [name for name, value in found[0].items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in found[0].items() if name not in tensors}
    if not all(isinstance(value, _PLAIN) for value in rest.values()):
        return
    for other in found:
        same = all(isinstance(other[n], _PLAIN) and other[n] == v for n, v in rest.items())
        if not same or not all(isinstance(other[name], Tensor) for name in tensors):
            raise Unverified("it is called in different ways")
    constants = tuple(rest.items())
    if len(tensors) in (2, 3) and found[0][tensors[-1]].is_complex():
        yield Roles(tuple(tensors[:-1]), tensors[-1], tensors[-1], constants)
    elif len(tensors) in (3, 4):
        *turned, first, second = tensors
        angles = found[0][first], found[0][second]
        if angles[0].shape == angles[1].shape and all(x.is_floating_point() for x in angles):
            yield Roles(tuple(turned), first, second, constants)
            yield Roles(tuple(turned), second, first, constants)


def _bound(signature: inspect.Signature, one: ModuleCall) -> dict[str, Any]:
    bound = signature.bind(*one.args, **one.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _forms(probe: Inputs, roles: Roles) -> Iterator[RotationForm]:
    x, cos = probe.kwargs[roles.turned[0]], probe.kwargs[roles.cos]
    missing = x.dim() - cos.dim()
    if missing not in (0, 1):
        return
    axes = (None,) if not missing else tuple(range(1, x.dim() - 1))
    casts = (False,) if cos.real.dtype == x.dtype else (True, False)
    orders = ((False, False), (True, False), (False, True))
    for axis, narrow, (split, backward) in itertools.product(axes, casts, orders):
        for rotary in FORMS:
            if not (split and rotary.interleaved):
                yield RotationForm(rotary, axis, split, backward, narrow)


def _attempt(
    function: Callable[..., Any],
    signature: inspect.Signature,
    roles: Roles,
    form: RotationForm,
    probes: list[Inputs],
) -> tuple[Rotation, float]:
    x, cos = probes[0].kwargs[roles.turned[0]], probes[0].kwargs[roles.cos]
    wide = torch.promote_types(x.dtype, cos.real.dtype)
    layer = Rotation(signature, roles, form, head_size=x.shape[-1], dtype=wide)
    # Two products and a sum, each rounded by itself or all at once.
    return layer.eval(), verify(function, layer, probes, dtype=x.dtype, reduction=4)


def _probes(
    signature: inspect.Signature, roles: Roles, calls: list[ModuleCall]
) -> Iterator[Inputs]:
    """The recorded calls with other tensors of every size, at their angles and at twice those."""
    source = generator()
    seen: set[tuple[torch.Size, ...]] = set()
    for one in calls:
        given = _bound(signature, one)
        shapes = tuple(given[name].shape for name in (*roles.turned, roles.cos, roles.sin))
        if shapes in seen:
            continue
        seen.add(shapes)
        cos, sin = given[roles.cos], given[roles.sin]
        for magnitude in MAGNITUDES:
            turned = {
                name: torch.randn(given[name].shape, generator=source).to(given[name]) * magnitude
                for name in roles.turned
            }
            yield Inputs((), {**given, **turned})
            # With the roles of cos and sin swapped these are other numbers, but no less a probe.
            twice = {roles.cos: cos * cos - sin * sin, roles.sin: 2 * cos * sin}
            if cos.is_complex():
                twice = {roles.cos: cos * cos}
            yield Inputs((), {**given, **turned, **twice})
