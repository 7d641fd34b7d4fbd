"""rotary_embedding: turns pairs of q and k by their position's angle (Su et al., arXiv:2104.09864).

A head of size d turns its first r <= d numbers; the rest passes through. Pairs are (i, i + r/2)
in the NeoX form and (2i, 2i + 1) in the interleaved form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import MAGNITUDES, Source, shifted, strided, transposed

if TYPE_CHECKING:
    from collections.abc import Iterator


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """q and k with each pair taken as a complex number times cos + i·sin, in complex128."""
    turn = torch.complex(cos.double(), sin.double())
    return _reference_one(q, turn, interleaved), _reference_one(k, turn, interleaved)


def _reference_one(x: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    half = turn.shape[-1]
    head, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    pairs = head.reshape(*head.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(first, second) * turn
    both = torch.stack((turned.real, turned.imag), dim=-1 if interleaved else -2)
    return torch.cat((both.flatten(-2), rest), dim=-1)


def torch_kernel(
    q: Tensor,  # [..., head]
    k: Tensor,  # [..., head]
    cos: Tensor,  # [..., rotary / 2], broadcast against q and k
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """(q, k) turned, in their own dtypes.

    x · cos plus partner · ±sin: three calls a tensor, which matters for one token on a CPU.
    """
    if interleaved:
        wide_cos = cos.repeat_interleave(2, dim=-1)
        signed_sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        wide_cos, signed_sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return (
        _turn(q, wide_cos, signed_sin, interleaved),
        _turn(k, wide_cos, signed_sin, interleaved),
    )


def _turn(x: Tensor, wide_cos: Tensor, signed_sin: Tensor, interleaved: bool) -> Tensor:
    rotary = wide_cos.shape[-1]
    head = x if rotary == x.shape[-1] else x[..., :rotary]
    if interleaved:
        partner = head.reshape(*head.shape[:-1], rotary // 2, 2).flip(-1).flatten(-2)
    else:
        partner = head.roll(rotary // 2, -1)
    turned = (head * wide_cos).addcmul_(partner, signed_sin)
    if rotary == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., rotary:]), dim=-1)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def angles(*shape: int) -> tuple[Tensor, Tensor]:
        angle = source.normal(*shape, magnitude=3.0).float()
        return angle.cos().to(dtype), angle.sin().to(dtype)

    for interleaved in (False, True):
        for tokens, head, rotary in ((0, 8, 8), (1, 64, 64), (7, 16, 8), (17, 80, 32), (3, 2, 2)):
            q, k = source.normal(2, 4, tokens, head), source.normal(2, 1, tokens, head)
            cos, sin = angles(2, 1, tokens, rotary // 2)
            kwargs = {"q": q, "k": k, "cos": cos, "sin": sin, "interleaved": interleaved}
            yield Sample(name=f"tokens {tokens} head {head} of {rotary}", kwargs=kwargs)
        for magnitude in MAGNITUDES:
            q, k = source.normal(5, 3, 16, magnitude=magnitude), source.normal(5, 1, 16)
            cos, sin = angles(5, 1, 8)
            kwargs = {"q": q, "k": k, "cos": cos, "sin": sin, "interleaved": interleaved}
            yield Sample(name=f"magnitude {magnitude}", kwargs=kwargs)
        for form in (strided, shifted, transposed):
            q, k = form(source.normal(5, 3, 16)), form(source.normal(5, 2, 16))
            cos, sin = angles(5, 1, 8)
            kwargs = {"q": q, "k": k, "cos": cos, "sin": sin, "interleaved": interleaved}
            yield Sample(name=form.__name__, kwargs=kwargs)


OP = Op(
    name="rotary_embedding",
    schema=("(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)"),
    keys=frozenset({"head_size", "rotary", "interleaved"}),
    reference=reference,
    samples=_samples,
    reduction=lambda kwargs: 2,
    results=("input", "input"),
    source="https://arxiv.org/abs/2104.09864",
)
