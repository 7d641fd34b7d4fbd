"""The pass over attention in modules' own code: found in one run, rewritten, proved."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt import structure
from polysilicon.adapt.attention_notes import Seen, method, notes
from polysilicon.adapt.attention_rules import Rule, rule_of, without_cache
from polysilicon.adapt.attention_sites import Site, Watch
from polysilicon.adapt.inline_attention import InlineAttention, refuse_weights
from polysilicon.adapt.outlining import ATTEND
from polysilicon.adapt.probe import (
    Inputs,
    Unverified,
    as_floats,
    generator,
    verify,
    verify_rounding,
)
from polysilicon.adapt.rebinding import Rebound
from polysilicon.adapt.recording import PADDING, run_probe
from polysilicon.layers.attention import Attention

if TYPE_CHECKING:
    from torch import nn

    from polysilicon.adapt.work import Work

#: Child of a module that holds its rewritten method.
CHILD = "polysilicon_own_code"

_SHORT = (torch.bfloat16, torch.float16)


def replace_attention_in_code(work: Work) -> dict[str, str]:
    """Puts our layer into code that attends by itself; returns path → why it stays."""
    inside = {m for path in work.attention for m in work.modules[path].modules()}
    own = {
        path: module
        for path, module in work.modules.items()
        if module in work.recording.calls
        and module not in work.recording.attention
        and module not in inside
    }
    watch = Watch(own.values())
    with watch:
        run_probe(work.model, work.scenarios)
    reasons: dict[str, str] = {}
    held = False
    for path, module in own.items():
        if module not in watch.sites:
            continue
        try:
            held |= _replace(work, path, module, watch.sites[module])
        except Unverified as failure:
            reasons[path] = str(failure)
    if held:
        base = getattr(work.model, "base_model", work.model)
        for model in dict.fromkeys((work.model, base)):
            work.surgery.before_forward(model, refuse_weights)
    return reasons


def why_kept(work: Work, reasons: dict[str, str], path: str, module: nn.Module) -> str:
    """What to say of an attention module that stays; `reasons` are those of its code, by path."""
    if module not in work.recording.calls:
        return "the probe prompts did not reach it"
    inside = [reasons[other] for other in reasons if f"{other}.".startswith(f"{path}.")]
    why = inside[0] if inside else "no softmax of one product goes into another there"
    return f"it computes attention in its own code: {why}"


def _replace(work: Work, path: str, module: nn.Module, sites: set[Site]) -> bool:
    """One module; returns whether its code would have held the weights."""
    if len(sites) != 1:
        raise Unverified(f"it attends in {len(sites)} places of its code")
    (site,) = sites
    obstacle = structure.obstacle(module)
    if obstacle or site.method in vars(module):
        raise Unverified(obstacle or f"its {site.method} was replaced before")
    calls = [Inputs(call.args, call.kwargs) for call in work.recording.calls[module]]
    exact, wide = module, calls
    if work.dtype in _SHORT:
        exact, wide = copy.deepcopy(module).float(), [as_floats(call) for call in calls]
    seen = notes(exact, site, _other(without_cache(wide[0]), 1.0, wide[0]))[0]
    rule = rule_of(module, site, calls, work.recording)
    layer = _layer(work, path, module, seen, rule)
    rebound = Rebound(module, {ATTEND: InlineAttention(layer, seen.score_heads)}, site).eval()
    error = _proved(module, rebound, exact, calls)
    work.surgery.attach(module, CHILD, rebound)
    work.surgery.set_attribute(module, site.method, rebound.forward)
    work.attention[path] = layer
    work.paged = work.paged or (f"{path}: {rule.reason}" if rule.reason else "")
    work.replaced(path, "attention", layer, error, "its own code prepares q, k and v")
    return site.softmax is not None


def _layer(work: Work, path: str, module: nn.Module, seen: Seen, rule: Rule) -> Attention:
    size = seen.q.shape[-1]
    assert seen.scale is not None
    numbers = [n for n in structure.numbers(module) if n > 0]
    nice = [size**-0.5, 1.0, *numbers, *(1 / n for n in numbers)]
    scale = next((n for n in nice if abs(n - seen.scale) <= 1e-4 * n), seen.scale)
    try:
        return Attention(
            seen.q.shape[1],
            seen.k.shape[1],
            size,
            seen.v.shape[-1],
            scale=scale,
            window=rule.window,
            causal=rule.causal,
            name=path,
            dtype=work.dtype,
            context=work.context,
        )
    except ValueError as refusal:
        raise Unverified(str(refusal)) from refusal


def _proved(module: nn.Module, rebound: Rebound, exact: nn.Module, calls: list[Inputs]) -> float:
    """Error of the rewritten code; in a short dtype proved in float32 first."""
    site = rebound.site
    assert site is not None
    probes = [
        _other(without_cache(call), magnitude, call)
        for call in calls
        if structure.first_tensor(call).shape[1] > 1  # type: ignore[union-attr]
        for magnitude in (1e-4, 1e-2, 1.0, 3.0)
    ]
    hidden = structure.first_tensor(calls[0])
    assert hidden is not None
    dtype, reduction = hidden.dtype, 4 * hidden.shape[-1]
    theirs, ours = partial(_run, module, None), partial(_run, module, rebound)
    if exact is module:
        return verify(theirs, ours, probes, dtype=dtype, reduction=reduction)
    twin = Rebound(exact, copy.deepcopy(rebound.layers), site).eval()
    floats = [as_floats(probe) for probe in probes]
    truth = partial(_run, exact, None)
    verify(truth, partial(_run, exact, twin), floats, dtype=torch.float32, reduction=reduction)
    pairs = list(zip(probes, floats, strict=True))
    return verify_rounding(truth, theirs, ours, pairs, dtype=dtype, reduction=reduction)


def _run(module: nn.Module, rebound: Rebound | None, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The module's first result, by its own code or by the rewritten one."""
    if rebound is None:
        result = module.forward(*args, **kwargs)
    else:
        assert rebound.site is not None
        with method(module, rebound.site.method, rebound.forward):
            result = module.forward(*args, **kwargs)
    first = result[0] if isinstance(result, (tuple, list)) else result
    # As in the probe prompts: nothing defines the results of padding tokens.
    return [first[0], first[1:, PADDING:]]


def _other(call: Inputs, magnitude: float, like: Inputs) -> Inputs:
    """The call with other hidden states."""
    hidden = structure.first_tensor(like)
    assert hidden is not None
    x = (torch.randn(hidden.shape, generator=generator()) * magnitude).to(hidden)

    def swap(value: Any) -> Any:
        return x if value is hidden else value

    kwargs = {name: swap(value) for name, value in call.kwargs.items()}
    return Inputs(tuple(swap(value) for value in call.args), kwargs)
