"""Binds every layer of a model to the kernels of a device, once, after weights are loaded."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polysilicon import ops, selection
from polysilicon.blame import kernel_failed
from polysilicon.devices import find, require_runnable
from polysilicon.errors import LayoutError
from polysilicon.explaining import span_text
from polysilicon.layers.base import Layer
from polysilicon.layers.packed_weight import RefusedLayout
from polysilicon.notices import notice
from polysilicon.proof import Proof
from polysilicon.records import Device
from polysilicon.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from polysilicon.choosing import Judge
    from polysilicon.errors import KernelError
    from polysilicon.records import Kernel, Problem, Provided
    from polysilicon.selection import Binding, Table


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One op slot of one layer and what serves it; `note` says why a weight could not be packed."""

    layer: str
    attribute: str
    binding: Binding
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report: which kernel serves an op, at which token counts, how often, why.

    `layouts` says which arguments lie packed, and how: argument → name of the layout.
    """

    op: str
    kernel: str
    tokens: str
    uses: int
    reason: str
    layouts: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """One entry of `ops` in the documented JSON (docs/json.md)."""
        return {
            "op": self.op,
            "kernel": self.kernel,
            "tokens": self.tokens,
            "uses": self.uses,
            "reason": self.reason,
            "layouts": dict(self.layouts),
        }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare()` did. `fingerprint` changes whenever a compiled graph would."""

    device: Device
    bound: tuple[Bound, ...]
    fingerprint: str

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """The distinct bindings."""
        return tuple({id(one.binding): one.binding for one in self.bound}.values())

    @property
    def rows(self) -> tuple[Row, ...]:
        """op → kernel → reason, in the order in which the model uses them."""
        uses: dict[tuple[str, str, str, str, tuple[tuple[str, str], ...]], int] = {}
        for one in self.bound:
            low = one.binding.problem.tokens[0]
            layouts = tuple((name, layout.name) for name, layout in one.binding.layouts.items())
            for highest, choice in one.binding.cuts:
                tokens = span_text((low, highest))
                reason = "; ".join(filter(None, (choice.reason, one.note)))
                key = (one.binding.problem.op, choice.kernel.name, tokens, reason, layouts)
                uses[key] = uses.get(key, 0) + 1
                low = highest + 1
        return tuple(
            Row(
                op=op,
                kernel=kernel,
                tokens=tokens,
                uses=count,
                reason=reason,
                layouts=dict(layouts),
            )
            for (op, kernel, tokens, reason, layouts), count in uses.items()
        )

    def kernel_failed(self, error: BaseException) -> KernelError | None:
        """The error that names the bound kernel that raised `error`; None where none did."""
        return kernel_failed(error, self.bindings)


def prepare(
    model: nn.Module, device: Device | str = "cpu", *, table: Table | None = None
) -> Prepared:
    """Chooses a kernel for every op of every layer of `model` and binds it, in place.

    Plugin kernels are proven against the portable ones first (`POLYSILICON_PROOF=off` skips it).
    Where a kernel takes a weight packed, the weight is packed, layer by layer, and its plain memory
    goes; `state_dict()`, saving, copying, loading and `undo()` go on seeing the logical values. The
    weights of a model that was prepared before are made plain where they must lie otherwise now.
    A model without our layers comes back unchanged, with no rows: `adapt()` puts them in.

    Example:
        >>> from polysilicon.layers.base import Layer
        >>> prepare(torch.nn.Linear(2, 2)).rows
        ()

    Raises:
        TypeError: the device is neither a Device nor a name.
        ValueError: a weight is on the meta device.
        DeviceError: the device is unknown, or forced and not on this machine.
        SelectionError: no kernel fits one of the problems.
    """
    found = require_runnable(_device(device, table))
    _refuse_meta(model)
    table = table or selection.current_table()
    proof = Proof(found, table)
    bound = bind_layers(model, found, table, proof.judge)
    return Prepared(device=found, bound=bound, fingerprint=_fingerprint(table, found, bound, proof))


def bind_layers(
    model: nn.Module, device: Device, table: Table, judge: Judge | None = None
) -> tuple[Bound, ...]:
    """Binds every op slot of every layer and packs the weights that the kernels take packed."""
    choose = _choices(device, table, judge)
    bound = []
    weights: Weights | None = None
    for name, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        for attribute, problem in layer.problems().items():
            plain: dict[str, str] = {}
            if _any_packs(problem.op, table.kernels[device.name]):
                weights = weights or Weights(model)
                plain = weights.plain(layer, attribute, ops.get(problem.op).roles)
            binding, refused = _lay_out(layer, attribute, functools.partial(choose, problem, plain))
            layer.bind_kernel(attribute, binding.fn, binding.dtypes)
            note = _note(binding, plain, refused)
            bound.append(Bound(layer=name, attribute=attribute, binding=binding, note=note))
    return tuple(bound)


def _device(device: Device | str, table: Table | None) -> Device:
    if isinstance(device, str):
        return find(device, table)
    if isinstance(device, Device):
        return device
    raise TypeError(
        f"prepare() got {device!r} ({type(device).__name__}) as device: expected a Device or its "
        "name, e.g. 'cpu'; `polysilicon devices` lists them"
    )


def _choices(device: Device, table: Table, judge: Judge | None) -> Callable[..., Binding]:
    """`selection.bind()` for equal questions once: (problem, plain, refused) → Binding."""
    known: dict[str, Binding] = {}

    def choose(problem: Problem, plain: dict[str, str], refused: dict[str, str]) -> Binding:
        key = f"{problem.key} {sorted(plain.items())} {sorted(refused.items())}"
        if key not in known:
            known[key] = selection.bind(
                problem, device=device, table=table, judge=judge, plain=plain, refused=refused
            )
        return known[key]

    return choose


def _lay_out(
    layer: Layer, attribute: str, choose: Callable[[dict[str, str]], Binding]
) -> tuple[Binding, dict[str, str]]:
    """Packs one slot's weights as the best kernel takes them; layout → why it was refused."""
    refused: dict[str, str] = {}
    while True:
        binding = choose(refused)
        try:
            layer.lay_out(attribute, binding.layouts)
        except RefusedLayout as why:  # the weight is as it was: the next best kernel's turn
            kernels = ", ".join(dict.fromkeys(c.kernel.name for _, c in binding.cuts))
            notice(
                f"{why}. The next best kernel serves {binding.problem.op} where {kernels} would",
                LayoutError,
            )
            refused = refused | {why.layout.name: why.reason}
        else:
            return binding, refused


def _any_packs(op: str, offered: Sequence[Provided[Kernel]]) -> bool:
    return any(entry.record.op == op and entry.record.layouts for entry in offered)


def _note(binding: Binding, plain: dict[str, str], refused: dict[str, str]) -> str:
    """Why arguments don't lie as some kernel would have taken them."""
    told = [
        f"{argument} stays plain: {reason}"
        for argument, reason in plain.items()
        if any(candidate.reason.endswith(reason) for candidate in binding.candidates)
    ]
    told += [f"layout {layout} {reason}" for layout, reason in refused.items()]
    return "; ".join(told)


def _refuse_meta(model: nn.Module) -> None:
    for kind, tensors in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_meta:
                raise ValueError(
                    f"{kind} {name} is on the meta device: prepare() chooses kernels for real "
                    "tensors; load the weights first"
                )


def _fingerprint(table: Table, device: Device, bound: Sequence[Bound], proof: Proof) -> str:
    parts = {
        f"{binding.problem.key} {[(highest, c.kernel.name) for highest, c in binding.cuts]} "
        f"{sorted((name, layout.name) for name, layout in binding.layouts.items())}"
        for binding in (one.binding for one in bound)
    }
    text = "\n".join((table.fingerprint, device.name, *proof.told(), *sorted(parts)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
