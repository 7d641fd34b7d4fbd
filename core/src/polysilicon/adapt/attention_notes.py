"""What a module's own code does with scores: told by running it on scores that we choose."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt import structure
from polysilicon.adapt.inline_attention import Product, Products, by_head
from polysilicon.adapt.outlining import ATTEND, outlined
from polysilicon.adapt.probe import Inputs, Unverified
from polysilicon.adapt.rebinding import forget, innermost, rebind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from polysilicon.adapt.attention_sites import Site

#: Scores below this have no weight: code masks with the least number, -10000 or minus infinity.
LEAST = -5e3

#: How far scores may be from a multiple of the product, relative to the largest, in float32.
_LINEAR = 1e-4


@dataclass(frozen=True)
class Seen:
    """One attention of a module's own code."""

    q: Tensor  # [b, h, tq, d]
    k: Tensor  # [b, hk, tk, d]
    v: Tensor  # [b, hk, tk, dv]
    scale: float | None  # None where it was not asked
    bias: Tensor | None  # [b, 1 or h, tq, tk]
    score_heads: int

    def visible(self) -> Tensor:  # bool [tq, tk]
        """The keys that have a weight in the first sequence, which is never padded.

        Raises:
            Unverified: heads see different keys.
        """
        shape = self.q.shape[2], self.k.shape[2]
        if self.bias is None:
            return torch.ones(shape, dtype=torch.bool)
        seen = self.bias[0] if self.bias.dtype == torch.bool else self.bias[0] > LEAST
        if not torch.equal(seen, seen[:1].expand_as(seen)):
            raise Unverified("its heads see different keys")
        return seen[0].expand(shape).cpu()

    def is_biased(self) -> bool:
        """Whether scores that have a weight get anything added."""
        if self.bias is None or self.bias.dtype == torch.bool:
            return False
        return bool((self.bias[self.bias > LEAST].abs() > 1e-6).any())


class _Notes(Products):
    """Stands for our layer: keeps what it saw, and attends as the module would.

    Without `whole` it keeps the bias alone and gives zeros, so that keys may be many.
    """

    def __init__(self, batch: int, whole: bool) -> None:
        self.batch, self.whole = batch, whole
        self.seen: list[Seen] = []
        self.score_heads = 1
        self._scores: Tensor | None = None

    def start(self, product: Product) -> Tensor:
        """Scores of zero, or those that are to be tried."""
        return super().start(product) if self._scores is None else self._scores.clone()

    def __call__(self, product: Product, bias: Callable[[], Tensor], v: Tensor) -> Tensor:
        """The module's own result, or zeros."""
        self._scores = None
        heads = product.q.shape[-3] if product.q.dim() == 4 else product.q.shape[0] // self.batch
        added = self._bias(heads, bias)
        q, k, values = (by_head(x, heads) for x in (product.q, product.k, v))
        if not self.whole:
            self.seen.append(Seen(q, k, values, None, by_head(added, heads), self.score_heads))
            return v.new_zeros(*v.shape[:-2], q.shape[-2], v.shape[-1])
        raw = product.q @ product.k.transpose(-1, -2)
        self._scores = product.factor * raw + (0 if product.added is None else product.added)
        scores = bias()
        added, of_head = by_head(added, heads), by_head(scores, heads)
        scale = _scale(by_head(raw, heads), of_head, added)
        self.seen.append(Seen(q, k, values, scale, added, self.score_heads))
        weights = torch.softmax(scores.float(), -1).to(v.dtype)
        return (weights if weights.dim() == v.dim() else by_head(weights, heads).flatten(0, 1)) @ v

    def _bias(self, heads: int, bias: Callable[[], Tensor]) -> Tensor:
        """The bias, of one head where that says the same."""
        self.score_heads = heads
        full = bias()
        self.score_heads = 1
        try:
            narrow = bias()
            same = full.dim() == 3 or torch.equal(narrow.expand_as(full), full)
        # Code that counts heads refuses scores of one.
        except RuntimeError:
            same = False
        if same:
            return narrow
        self.score_heads = heads
        return full

    def scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """PyTorch's function, noted; zeros without `whole`."""
        names = ("attn_mask", "dropout_p", "is_causal")
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        mask, scale = given.get("attn_mask"), given.get("scale")
        if mask is None and given.get("is_causal"):
            mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
        mask = None if mask is None else mask.view((1,) * (4 - mask.dim()) + mask.shape)
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        self.seen.append(Seen(query, key, value, scale, mask, 1))
        if not self.whole:
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        function = torch.nn.functional.scaled_dot_product_attention
        return function(query, key, value, *args, **kwargs)


def _scale(product: Tensor, scores: Tensor, bias: Tensor) -> float:
    """The number by which the code multiplies products.

    Raises:
        Unverified: it does something else with them.
    """
    moved = (scores.double() - bias.double()).nan_to_num(0, 0, 0)
    kept = ((bias > LEAST) & (scores > LEAST)).expand_as(moved)
    moved, product = moved[kept], product.double()[kept]
    power = product.square().sum()
    if not power > 0:
        raise Unverified("the probe prompts gave scores of zero only")
    scale = (moved * product).sum() / power
    largest = scores.double().expand_as(kept)[kept].abs().max()
    if not (moved - scale * product).abs().max() <= _LINEAR * largest:
        raise Unverified("its scores are no multiple of the product of queries and keys")
    return float(scale)


@contextmanager
def method(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """The module has `function` for its method `name` while the context is open."""
    vars(module)[name] = function
    try:
        yield
    finally:
        del vars(module)[name]


def notes(module: nn.Module, site: Site, probe: Inputs, *, whole: bool = True) -> list[Seen]:
    """What the module's attention is on one call, in order; without `whole` only what it masks.

    Raises:
        Unverified: its code can't be rewritten, or raises on these inputs.
    """
    original = getattr(type(module), site.method)
    hidden = structure.first_tensor(probe)
    assert hidden is not None
    noting = _Notes(hidden.shape[0], whole)
    code = outlined(innermost(original), site)
    function, name = rebind(original, {ATTEND: noting}, code)
    try:
        with method(module, site.method, function.__get__(module)):
            module.forward(*probe.args, **probe.kwargs)
    except Unverified:
        raise
    # Foreign code on made-up inputs: whatever it raises means "not what we took it for".
    except Exception as error:
        raise Unverified(f"its rewritten code raised {type(error).__name__}: {error}") from error
    finally:
        forget(name)
    if not noting.seen:
        raise Unverified("its rewritten code did not attend")
    return noting.seen
