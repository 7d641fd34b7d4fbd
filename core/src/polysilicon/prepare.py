"""Binds every layer of a model to the kernels of a device, once, after weights are loaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polysilicon import ops, selection
from polysilicon.blame import kernel_failed
from polysilicon.devices import find, require_runnable
from polysilicon.explaining import span_text
from polysilicon.layers.base import Layer
from polysilicon.proof import Proof

if TYPE_CHECKING:
    from torch import nn

    from polysilicon.errors import KernelError
    from polysilicon.records import Device
    from polysilicon.selection import Binding, Table


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One op slot of one layer and what serves it."""

    layer: str
    attribute: str
    binding: Binding


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report: which kernel serves an op, at which token counts, how often, why."""

    op: str
    kernel: str
    tokens: str
    uses: int
    reason: str

    def as_dict(self) -> dict[str, str | int]:
        """One entry of `ops` in the documented JSON (docs/json.md)."""
        return {
            "op": self.op,
            "kernel": self.kernel,
            "tokens": self.tokens,
            "uses": self.uses,
            "reason": self.reason,
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
        uses: dict[tuple[str, str, str, str], int] = {}
        for one in self.bound:
            low = one.binding.problem.tokens[0]
            for highest, choice in one.binding.cuts:
                tokens = span_text((low, highest))
                key = (one.binding.problem.op, choice.kernel.name, tokens, choice.reason)
                uses[key] = uses.get(key, 0) + 1
                low = highest + 1
        return tuple(
            Row(op=op, kernel=kernel, tokens=tokens, uses=count, reason=reason)
            for (op, kernel, tokens, reason), count in uses.items()
        )

    def kernel_failed(self, error: BaseException) -> KernelError | None:
        """The error that names the bound kernel that raised `error`; None where none did."""
        return kernel_failed(error, self.bindings)


def prepare(
    model: nn.Module, device: Device | str = "cpu", *, table: Table | None = None
) -> Prepared:
    """Chooses a kernel for every op of every layer of `model` and binds it, in place.

    Plugin kernels are proven against the portable ones first (`POLYSILICON_PROOF=off` skips it).
    A model without our layers comes back unchanged, with no rows: `adapt()` puts them in.

    Example:
        >>> from polysilicon.layers.base import Layer
        >>> prepare(torch.nn.Linear(2, 2)).rows
        ()

    Raises:
        ValueError: a weight is on the meta device.
        DeviceError: the device is unknown, or forced and not on this machine.
        SelectionError: no kernel fits one of the problems.
    """
    found = require_runnable(find(device, table) if isinstance(device, str) else device)
    _refuse_meta(model)
    table = table or selection.current_table()
    proof = Proof(found, table)
    known: dict[str, Binding] = {}
    bound = []
    for name, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        for attribute, problem in layer.problems().items():
            if problem.key not in known:
                known[problem.key] = selection.bind(
                    problem,
                    device=found,
                    table=table,
                    judge=proof.judge,
                    plain=dict.fromkeys(ops.get(problem.op).roles, "its layer keeps it plain"),
                )
            binding = known[problem.key]
            layer.bind_kernel(attribute, binding.fn)
            bound.append(Bound(layer=name, attribute=attribute, binding=binding))
    return Prepared(
        device=found,
        bound=tuple(bound),
        fingerprint=_fingerprint(table, found, known, proof),
    )


def _refuse_meta(model: nn.Module) -> None:
    for kind, tensors in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_meta:
                raise ValueError(
                    f"{kind} {name} is on the meta device: prepare() chooses kernels for real "
                    "tensors; load the weights first"
                )


def _fingerprint(table: Table, device: Device, bindings: dict[str, Binding], proof: Proof) -> str:
    parts = [table.fingerprint, device.name, *proof.told()]
    for key, binding in sorted(bindings.items()):
        parts.append(f"{key} {[(highest, choice.kernel.name) for highest, choice in binding.cuts]}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
