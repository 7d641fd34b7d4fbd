"""The passes over leaves (norms, activations, rotary, linears, tables) and over gated MLPs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import nn

from polysilicon.adapt import (
    activations,
    dense_experts,
    experts,
    linears,
    mlps,
    norms,
    rotary,
    routers,
)
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.structure import Candidate, is_leaf, label, obstacle, parameters
from polysilicon.layers.quantized_experts import QuantizedExperts
from polysilicon.layers.quantized_weight import QuantizedLayer
from polysilicon.layers.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.adapt.report import Kind
    from polysilicon.adapt.work import Work
    from polysilicon.layers.base import Layer

    Recogniser = Callable[[Candidate], tuple[Layer, float]]


#: What the report says of layers that were there before adapt().
_LOADED = "loaded so: its weights are packed as in the checkpoint"


def list_ours(work: Work) -> None:
    """Lists the layers of ours that the model was loaded with; no pass touches them."""
    head = getattr(work.model, "get_output_embeddings", lambda: None)()
    for path, module in work.modules.items():
        if isinstance(module, QuantizedLayer):
            kind: Kind = "experts" if isinstance(module, QuantizedExperts) else "linear"
            work.replaced(path, "lm_head" if module is head else kind, module, 0.0, _LOADED)


def replace_leaves(work: Work) -> None:
    """Replaces every module without children that one of our layers reproduces."""
    head = getattr(work.model, "get_output_embeddings", lambda: None)()
    for path, module in work.modules.items():
        if not is_leaf(module) or isinstance(module, QuantizedLayer):
            continue
        candidate = work.candidate(path, module)
        found = _recogniser(candidate, module is head)
        if found is None:
            if parameters(module):
                _keep_unknown(work, candidate)
            continue
        _try(work, candidate, *found)


def list_rest(work: Work) -> None:
    """Lists the modules that compute something and that no pass looked at.

    Experts, recurrences and the like with weights of their own beside those of their children,
    and leaves that the probe prompt ran through.
    """
    for path, module in work.modules.items():
        if path in work.rows or isinstance(module, (nn.Dropout, nn.Identity)):
            continue
        inside = {id(p) for child in module.children() for p in child.parameters()}
        own = any(id(p) not in inside for p in parameters(module).values())
        if own or (is_leaf(module) and module in work.recording.calls):
            _keep_unknown(work, work.candidate(path, module))


def _keep_unknown(work: Work, candidate: Candidate) -> None:
    work.kept(candidate.path, label(candidate), "not a kind of module that adapt() knows")


def _recogniser(candidate: Candidate, head: bool) -> tuple[Kind, Recogniser] | None:
    if rotary.may_be_rotary(candidate):
        return "rotary", rotary.recognise_rotary
    if linears.may_be_embedding(candidate):
        return "embedding", linears.recognise_embedding
    if linears.has_matrix(candidate):
        if candidate.call is not None and isinstance(candidate.call.output, tuple):
            return None
        if head:
            return "lm_head", lambda c: linears.recognise_linear(c, head=True)
        return "linear", linears.recognise_linear
    if norms.may_be_norm(candidate):
        return "norm", norms.recognise_norm
    if activations.may_be_activation(candidate):
        return "activation", activations.recognise_activation
    return None


def _try(work: Work, candidate: Candidate, kind: Kind, recognise: Recogniser) -> bool:
    path, module = candidate.path, candidate.module
    reason = obstacle(module)
    if reason:
        work.kept(path, kind, reason)
        return False
    try:
        layer, error = recognise(candidate)
    except Unverified as failure:
        work.kept(path, kind, str(failure))
        return False
    work.replace(path, module, layer)
    work.replaced(path, kind, layer, error)
    return True


def replace_experts(work: Work) -> None:
    """Replaces routers and stacked experts, whose activations are ours by then."""
    for path, module in work.modules.items():
        if isinstance(module, QuantizedLayer):
            continue
        candidate = work.candidate(path, module)
        if routers.may_be_router(candidate):
            if _try(work, candidate, "experts", routers.recognise_router):
                _holding(work, path)
        elif dense_experts.may_be_scores(candidate):
            _try(work, candidate, "experts", dense_experts.recognise_scores)
        else:
            recognise = _experts(candidate)
            if recognise is not None and _try(work, candidate, "experts", recognise):
                _inside(work, path)
    if any(isinstance(module, Router) for module in work.model.modules()):
        work.surgery.before_forward(work.model, routers.refuse_logits)


def _holding(work: Work, path: str) -> None:
    """The child that holds a router's correction is read by the router, and never called."""
    router = work.model.get_submodule(path)
    held = f"{path}.{router.held}"
    if router.held and held in work.rows:
        whole = work.rows[path]
        work.rows[held] = dataclasses.replace(whole, path=held)


def _experts(candidate: Candidate) -> Recogniser | None:
    if experts.may_be_experts(candidate):
        return experts.recognise_experts
    return dense_experts.recognise_shares if dense_experts.may_be_shares(candidate) else None


def replace_mlps(work: Work) -> None:
    """Merges gate and up of every gated MLP whose linears were replaced."""
    for path, module in work.modules.items():
        candidate = work.candidate(path, module)
        if is_leaf(module) or not mlps.may_be_gated_mlp(candidate):
            continue
        if not _try(work, candidate, "mlp", mlps.recognise_gated_mlp):
            # Not an omission: its parts are ours already.
            del work.rows[path]
            continue
        _inside(work, path)


def _inside(work: Work, path: str) -> None:
    """The activation of a module that was replaced in one piece is computed by that piece."""
    whole = work.rows[path]
    for other, row in work.rows.items():
        if row.kind == "activation" and other.rpartition(".")[0] == path:
            by, op = whole.replaced_by, whole.op
            work.rows[other] = dataclasses.replace(
                row, status="replaced", replaced_by=by, op=op, reason=""
            )
