"""Recognises attention modules of the standard form and gives them the one-piece forward."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.adapt import structure
from polysilicon.adapt.probe import (
    Inputs,
    Unverified,
    as_floats,
    first_verified,
    generator,
    verify,
    verify_rounding,
)
from polysilicon.adapt.self_attention import FORMS, NormPlace, Parts, RotaryForm, SelfAttention
from polysilicon.layers.activation import Activation
from polysilicon.layers.linear import Linear
from polysilicon.layers.norm import LayerNorm, RMSNorm
from polysilicon.layers.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from polysilicon.adapt.recording import ModuleCall, Recording
    from polysilicon.adapt.surgery import Surgery
    from polysilicon.layers.attention import Attention

#: Child that holds the one-piece form.
CHILD = "polysilicon_self_attention"

#: How q and k are turned, and where their norms stand.
Form = tuple[RotaryForm | None, NormPlace]


@dataclass(frozen=True)
class Subject:
    """An attention module with its adapted children and the layer that attends for it."""

    module: nn.Module
    parts: Parts
    layer: Attention
    layer_idx: int

    def fused(self, form: Form) -> SelfAttention:
        """The one-piece form over the same children."""
        rotary, place = form
        fused = SelfAttention(
            self.parts, self.layer, rotary=rotary, norm_place=place, layer_idx=self.layer_idx
        )
        return fused.eval()

    def exact(self) -> Subject:
        """A copy in float32."""
        twin = copy.deepcopy(self.module).float()
        names = {child: name for name, child in self.module.named_modules()}

        def linear(part: Linear) -> Linear:
            found = twin.get_submodule(names[part])
            assert isinstance(found, Linear)
            return found

        own = self.parts
        norms = None
        if own.norms is not None:
            first, second = (twin.get_submodule(names[norm]) for norm in own.norms)
            norms = first, second
        out = None if own.out is None else linear(own.out)
        parts = Parts(tuple(linear(part) for part in own.qkv), out, norms)
        return Subject(twin, parts, copy.deepcopy(self.layer), self.layer_idx)


def fuse(
    module: nn.Module,
    layer: Attention,
    recording: Recording,
    surgery: Surgery,
) -> float:
    """Replaces the module's forward by the one-piece form; returns the error measured.

    Raises:
        Unverified: its children do not look like the standard form, or the results differ.
    """
    if "forward" in vars(module):
        raise Unverified("its forward was replaced before, by accelerate or by hand")
    seen = recording.calls[module][0]
    _check_signature(module, seen)
    parts = _parts(module, layer, seen, surgery)
    layer_idx = getattr(module, "layer_idx", None)
    if not isinstance(layer_idx, int):
        raise Unverified("it has no layer_idx")
    subject = Subject(module, parts, layer, layer_idx)
    probes = _probes(module, seen)
    short = parts.qkv[0].weight.dtype in (torch.bfloat16, torch.float16)
    exact = subject.exact() if short else None
    attempts = [
        partial(_attempt, subject, exact, form, probes)
        for form in itertools.product(_forms(seen), _places(parts))
    ]
    fused, error = first_verified(attempts, "it takes no form that we know")
    surgery.attach(module, CHILD, fused)
    surgery.set_attribute(module, "forward", fused.forward)
    return error


class _NotingCache:
    """Stands for Transformers' cache: notes what is put into it and where."""

    def __init__(self) -> None:
        self.noted: list[Tensor] = []

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they came."""
        self.noted += [key, value, torch.tensor([float(layer_idx)])]
        return key, value


def _run_with_cache(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output with a cache, what went into the cache, and the output without one."""
    cache = _NotingCache()
    name = kwargs.pop("cache_argument")
    with_cache: Tensor = function(*args, **kwargs, **{name: cache})[0]
    return [with_cache, *cache.noted, function(*args, **kwargs)[0]]


def _cache_argument(module: nn.Module) -> str:
    """`cache` since Transformers 5.24, `past_key_values` before."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _check_signature(module: nn.Module, seen: ModuleCall) -> None:
    if not isinstance(seen.output, tuple) or len(seen.output) != 2:
        raise Unverified("it does not return a pair of output and weights")
    ours = list(inspect.signature(SelfAttention.forward).parameters)[1:]
    theirs = list(inspect.signature(module.forward).parameters)
    if theirs[: len(seen.args)] != ours[: len(seen.args)]:
        raise Unverified("its positional arguments are of another order")


def _attempt(
    subject: Subject, exact: Subject | None, form: Form, probes: list[Inputs]
) -> tuple[SelfAttention, float]:
    """The one-piece form, proved; in a short dtype first in float32, where the bound is sharp."""
    if exact is None:
        fused = subject.fused(form)
        return fused, _proved(subject, fused, probes)
    floats = [as_floats(probe) for probe in probes]
    _proved(exact, exact.fused(form), floats)
    fused = subject.fused(form)
    return fused, _rounding(subject, fused, exact, probes, floats)


def _proved(subject: Subject, fused: SelfAttention, probes: list[Inputs]) -> float:
    weight = subject.parts.qkv[0].weight
    return verify(
        partial(_run_with_cache, subject.module.forward),
        partial(_run_with_cache, fused),
        probes,
        dtype=weight.dtype,
        reduction=4 * max(weight.shape),
    )


def _rounding(
    subject: Subject,
    fused: SelfAttention,
    exact: Subject,
    probes: list[Inputs],
    floats: list[Inputs],
) -> float:
    """Error in a short dtype, the form being proved."""
    weight = subject.parts.qkv[0].weight
    return verify_rounding(
        partial(_run_with_cache, exact.module.forward),
        partial(_run_with_cache, subject.module.forward),
        partial(_run_with_cache, fused),
        list(zip(probes, floats, strict=True)),
        dtype=weight.dtype,
        reduction=max(weight.shape),
    )


def _forms(seen: ModuleCall) -> tuple[RotaryForm | None, ...]:
    embeddings = seen.kwargs.get("position_embeddings")
    pair = isinstance(embeddings, (tuple, list)) and len(embeddings) == 2
    return (*FORMS, None) if pair else (None,)


def _places(parts: Parts) -> tuple[NormPlace, ...]:
    return ("none",) if parts.norms is None else ("head", "projection", "rotated")


def _parts(module: nn.Module, layer: Attention, seen: ModuleCall, surgery: Surgery) -> Parts:
    """The adapted children by what they were given in the recorded call."""
    hidden = structure.first_tensor(seen)
    linears: list[tuple[Linear, ModuleCall]] = []
    norms: list[nn.Module] = []
    for child, inner in seen.children:
        ours = surgery.replacements.get(child)
        if isinstance(ours, Linear):
            linears.append((ours, inner))
        elif isinstance(ours, (RMSNorm, LayerNorm)):
            norms.append(ours)
        elif isinstance(child, QuantizedLinear):
            raise Unverified("its projections are quantised")
        elif isinstance(ours, Activation) or any(True for _ in child.parameters()):
            raise Unverified(f"it also runs {type(child).__name__}")
    if len(seen.children) != len({id(child) for child, _ in seen.children}):
        raise Unverified("it calls a child twice")
    inputs = tuple(ours for ours, inner in linears if structure.first_tensor(inner) is hidden)
    outputs = [ours for ours, inner in linears if structure.first_tensor(inner) is not hidden]
    if len(inputs) not in (1, 3) or len(outputs) > 1 or len(norms) not in (0, 2):
        raise Unverified(
            f"it has {len(inputs)} input projections, {len(outputs)} output projections and "
            f"{len(norms)} norms, expected 1 or 3, at most 1, and 0 or 2"
        )
    out = outputs[0] if outputs else None
    _check_widths(layer, inputs, out)
    pair = (norms[0], norms[1]) if norms else None
    return Parts(inputs, out, pair)


def _check_widths(layer: Attention, inputs: tuple[Linear, ...], out: Linear | None) -> None:
    q, k = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    v = layer.num_kv_heads * layer.v_head_dim
    widths = [part.out_features for part in inputs]
    if widths not in ([q, k, v], [q + k + v]):
        raise Unverified(f"its projections have widths {widths}, expected {[q, k, v]}")
    if out is not None and out.in_features != layer.num_heads * layer.v_head_dim:
        raise Unverified("its output projection does not take the heads' values")
    if any(part.transposed for part in (*inputs, *([out] if out is not None else []))):
        raise Unverified("its weights are stored transposed")


def _probes(module: nn.Module, seen: ModuleCall) -> list[Inputs]:
    """The recorded call again with other hidden states; `_run_with_cache` adds the cache."""
    hidden = structure.first_tensor(seen)
    assert hidden is not None
    source = generator()
    probes = []
    # Scores grow with the square of the input: past this, rounding of either side shows.
    for magnitude in (1e-4, 1e-2, 1.0, 3.0):
        x = torch.randn(hidden.shape, generator=source).to(hidden) * magnitude
        args = tuple(x if value is hidden else value for value in seen.args)
        kwargs = {
            name: x if value is hidden else value
            for name, value in seen.kwargs.items()
            if name not in ("cache", "past_key_values")
        }
        kwargs["cache_argument"] = _cache_argument(module)
        probes.append(Inputs(args, kwargs))
    return probes
