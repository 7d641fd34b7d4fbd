"""Recognises elementwise activation modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polysilicon.adapt import structure
from polysilicon.adapt.probe import Unverified, call, tensors, verify
from polysilicon.layers.activation import Activation
from polysilicon.ops.activation import KINDS

if TYPE_CHECKING:
    from polysilicon.adapt.structure import Candidate
    from polysilicon.layers.base import Layer

_WIDTH = 96


def may_be_activation(candidate: Candidate) -> bool:
    """A leaf without weights that takes one tensor and changes it elementwise."""
    module = candidate.module
    if not structure.is_leaf(module) or structure.parameters(module):
        return False
    if structure.buffers(module) or structure.required_arguments(module) != 1:
        return False
    # Behaviour decides: shape and dtype kept, one element depends on no other, not the identity.
    x = torch.linspace(-3, 3, 24).view(2, 12)
    try:
        whole, part = module(x.clone()), module(x[:1, 3:7].clone())
    # Foreign code on made-up inputs: whatever it raises means "not an activation".
    except Exception:
        return False
    if not isinstance(whole, torch.Tensor) or whole.shape != x.shape or whole.dtype != x.dtype:
        return False
    # Not equal: on some processors short rows go another way than long ones, a rounding apart.
    alone = torch.allclose(whole[:1, 3:7], part, rtol=1e-5, atol=1e-6)
    return alone and not torch.equal(whole, x)


def recognise_activation(candidate: Candidate) -> tuple[Layer, float]:
    """Our activation of the kind that the module computes, and the error measured.

    Raises:
        Unverified: no kind that we know reproduced it.
    """
    like = torch.empty(0, dtype=candidate.dtype)
    found: tuple[Layer, float] | None = None
    for kind in KINDS:
        try:
            layer = Activation(kind, dtype=candidate.dtype)
            probes = (call(x) for x in tensors(_WIDTH, like))
            error = verify(candidate.module, layer, probes, dtype=candidate.dtype)
        except Unverified:
            continue
        # In bfloat16 both forms of GELU pass: the nearer one is it.
        if found is None or error < found[1]:
            found = layer, error
    if found is None:
        raise Unverified(f"none of the {len(KINDS)} activations that we know computes it")
    return found
