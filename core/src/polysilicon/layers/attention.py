"""Attention of a decoder layer: dense over the caller's keys, or paged over the engine's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from polysilicon.errors import AdaptError
from polysilicon.layers.base import Layer
from polysilicon.ops import attention, kv_store, paged_attention
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from torch import Tensor

    from polysilicon.records import Layout


@dataclass(frozen=True)
class PagedBatch:
    """One step of the engine: T tokens of B sequences laid end to end.

    Attributes:
        slots: int64 [T], where each token's key and value go; -1 for a padding token.
        block_tables: int32 [B, max_blocks], the blocks of each sequence.
        query_starts: int32 [B + 1], first token of each sequence, then the end of the last.
        kv_lengths: int32 [B], tokens of each sequence in the cache, this step's included.
        max_query: the most tokens that one sequence has in this step.
        max_kv: the longest of `kv_lengths`.
        state_slots: int32 [B], row of each sequence in the states of recurrent layers; -1 for
            none. None where the model has no such layers.
        seen: int32 [B], tokens of each sequence before this step; None where state_slots is.
        query_bound: what kernels are told for `max_query`: 1 or T. Unlike `max_query` it is the
            same for every step of one shape, so a compiled graph serves them all.
    """

    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    kv_lengths: Tensor
    max_query: int
    max_kv: int
    state_slots: Tensor | None = None
    seen: Tensor | None = field(init=False, default=None)
    query_bound: int = field(init=False)

    def __post_init__(self) -> None:
        sequences = self.block_tables.shape[0]
        if self.query_starts.shape != (sequences + 1,) or self.kv_lengths.shape != (sequences,):
            raise ValueError(
                f"a paged batch of {sequences} block tables needs {sequences + 1} query_starts and "
                f"{sequences} kv_lengths, not {tuple(self.query_starts.shape)} and "
                f"{tuple(self.kv_lengths.shape)}"
            )
        bound = 1 if self.max_query == 1 else self.slots.shape[0]
        object.__setattr__(self, "query_bound", bound)
        if self.state_slots is not None:
            seen = self.kv_lengths - self.query_starts.diff()
            object.__setattr__(self, "seen", seen)


@dataclass
class PagedContext:
    """What layers with a cache or a state share: the step that the engine runs, if any."""

    batch: PagedBatch | None = None
    #: Who attached the caches and states that the layers hold now.
    owner: object | None = None


class Attention(Layer):
    """Attention without projections.

    Outside the engine (`context.batch` is None) keys and values are what the caller passes, with
    the caller's mask. Inside, the b = 1 row holds the step's tokens end to end: their keys and
    values are stored in this layer's cache, and each token sees its own sequence's.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: size of a query and key head.
        v_head_dim: size of a value head, `head_dim` unless given.
        scale: factor on the scores, before the softcap.
        window: keys a query sees, itself included; 0 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
        sinks: [num_heads] a logit a head that takes weight and gives no value.
        causal: whether a query sees only its past, where the caller gives no mask.
        name: the layer's name in its model, for errors.
        dtype: of the activations; an attached cache's dtype takes its place.
        context: shared by all attention layers of a model.
    """

    sinks: Tensor | None
    _shared: Attention | None
    k_cache: Tensor | None
    v_cache: Tensor | None
    # Bound callables; prepare() replaces them by what it chose for the device.
    attention: Callable[..., tuple[Tensor, Tensor]]
    kv_store: Callable[..., None]
    paged_attention: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        causal: bool = True,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        context: PagedContext | None = None,
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"attention {name!r} has {num_heads} query heads and {num_kv_heads} key heads: "
                "the query heads must be a multiple of the key heads"
            )
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(
                f"attention {name!r} has sinks of shape {tuple(sinks.shape)}: expected one for "
                f"each of its {num_heads} heads"
            )
        if window < 0 or softcap < 0:
            raise ValueError(
                f"attention {name!r} has window {window} and softcap {softcap}: "
                "use 0 for none, else a positive number"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim is None else v_head_dim
        self.scale, self.window, self.softcap, self.causal = scale, window, softcap, causal
        self.name, self.dtype = name, dtype
        self.context = PagedContext() if context is None else context
        # Plain attributes: caches are the engine's and sinks the model's, neither is state here.
        object.__setattr__(self, "sinks", sinks)
        object.__setattr__(self, "_shared", None)
        self.detach_cache()
        self.bind_kernel("attention", attention.torch_kernel)
        self.bind_kernel("kv_store", kv_store.torch_kernel)
        self.bind_kernel("paged_attention", paged_attention.torch_kernel)

    def problems(self) -> dict[str, Problem]:
        """The three op slots; block_size is known once a cache is attached."""
        cache = self.cache_owner.k_cache
        dtype = self.dtype if cache is None else cache.dtype
        sizes = {
            "kv_heads": self.num_kv_heads,
            "head_size": self.head_dim,
            "v_head_size": self.v_head_dim,
        }
        rule = sizes | {
            "heads": self.num_heads,
            "window": self.window,
            "softcap": self.softcap > 0,
            "sinks": self.sinks is not None,
            "causal": self.causal,
        }
        paged = {} if cache is None else {"block_size": cache.shape[1]}
        facts = {"attention": rule, "kv_store": sizes | paged, "paged_attention": rule | paged}
        name = str(dtype).removeprefix("torch.")
        return {op: Problem(op=op, dtype=name, facts=own) for op, own in facts.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype  # it has no weight that shows it
        return super()._apply(fn, recurse)

    def attach_cache(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Gives the layer its cache, [blocks, block_size, num_kv_heads, head size] each."""
        for cache, size in ((k_cache, self.head_dim), (v_cache, self.v_head_dim)):
            if cache.dim() != 4 or cache.shape[2:] != (self.num_kv_heads, size):
                raise ValueError(
                    f"attention {self.name!r} was given a cache of shape {tuple(cache.shape)}: "
                    f"expected [blocks, block_size, {self.num_kv_heads}, {size}]"
                )
        object.__setattr__(self, "k_cache", k_cache)
        object.__setattr__(self, "v_cache", v_cache)

    @property
    def cache_owner(self) -> Attention:
        """The layer whose cache this one reads: itself unless told otherwise."""
        return self if self._shared is None else self._shared

    def share_cache(self, owner: Attention) -> None:
        """From now on reads the keys and values that `owner` stored in the same step, and no own.

        Raises:
            ValueError: the owner's keys or values are of other sizes.
        """
        sizes = [(x.num_kv_heads, x.head_dim, x.v_head_dim) for x in (self, owner)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"attention {self.name!r} has key heads and sizes {sizes[0]} and cannot read the "
                f"cache of {owner.name!r}, which has {sizes[1]}: share between equal layers"
            )
        object.__setattr__(self, "_shared", owner.cache_owner)

    def cache_bytes(self, block_size: int) -> int:
        """Bytes of one block of the cache; none where another layer's is read."""
        if self._shared is not None:
            return 0
        return (
            self.num_kv_heads
            * (self.head_dim + self.v_head_dim)
            * (self.dtype.itemsize * block_size)
        )

    def allocate_cache(
        self,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        layout: Layout | None = None,
    ) -> None:
        """Makes a cache of the layer's dtype and attaches it; see `allocate_kv_cache`.

        A layer that reads another's needs none.
        """
        if self._shared is not None:
            return
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_dim, self.v_head_dim)
        caches = allocate_kv_cache(*sizes, dtype=self.dtype, device=device, layout=layout)
        self.attach_cache(*caches)

    def detach_cache(self) -> None:
        """Drops the cache; the layer then works outside the engine only."""
        object.__setattr__(self, "k_cache", None)
        object.__setattr__(self, "v_cache", None)

    def forward(
        self,
        q: Tensor,  # [b, num_heads, tq, head_dim]
        k: Tensor,  # [b, num_kv_heads, tk, head_dim]
        v: Tensor,  # [b, num_kv_heads, tk, v_head_dim]
        mask: Tensor | None = None,  # as Transformers makes it: bool or additive
    ) -> Tensor:  # [b, tq, num_heads, v_head_dim]
        """Attention by the shared context's step if there is one, else dense."""
        batch = self.context.batch
        if batch is not None:
            return self._paged(q, k, v, batch)
        # A mask that the caller made already says what the past and the window allow.
        own = mask is None
        out, _ = self.attention(
            q,
            k,
            v,
            mask,
            self.scale,
            self.causal and own,
            self.window if own else 0,
            self.softcap,
            self.sinks,
        )
        return out

    def _paged(self, q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch) -> Tensor:
        k_cache, v_cache = self.cache_owner.k_cache, self.cache_owner.v_cache
        if k_cache is None or v_cache is None:
            raise AdaptError(
                f"attention {self.name!r} has no cache: call attach_cache() on every attention "
                "layer before a paged step"
            )
        tokens = batch.slots.shape[0]
        if q.shape[0] != 1 or q.shape[2] != tokens or k.shape[2] != tokens:
            raise AdaptError(
                f"attention {self.name!r} got queries {tuple(q.shape)} and keys {tuple(k.shape)} "
                f"in a paged step of {tokens} tokens: expected batch 1 with all tokens in one row"
            )
        if self._shared is None:
            self.kv_store(k[0].transpose(0, 1), v[0].transpose(0, 1), k_cache, v_cache, batch.slots)
        out, _ = self.paged_attention(
            q[0].transpose(0, 1),
            k_cache,
            v_cache,
            batch.block_tables,
            batch.query_starts,
            batch.kv_lengths,
            self.scale,
            self.window,
            self.softcap,
            self.sinks,
            self.causal,
            batch.query_bound,
            batch.block_tables.shape[1] * k_cache.shape[1],
        )
        return out[None]

    def extra_repr(self) -> str:
        """What tells two attention layers apart."""
        parts = [f"heads={self.num_heads}/{self.num_kv_heads}", f"head={self.head_dim}"]
        parts += [f"v_head={self.v_head_dim}"] if self.v_head_dim != self.head_dim else []
        parts += [f"window={self.window}"] if self.window else []
        parts += [f"softcap={self.softcap}"] if self.softcap else []
        parts += ["sinks"] if self.sinks is not None else []
        return ", ".join(parts)


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:  # [num_blocks, block_size, num_kv_heads, head size] each
    """Key and value caches of one layer, lying in memory as `layout` says.

    They are not initialised, so that memory is taken as slots are stored: no kernel may read a
    slot that was never stored, which the op's samples poison.

    The default lies as its dims are written: a token's heads together, so that a sequence whose
    blocks are adjacent is one view, and a store is one copy of a row.
    """
    if min(num_blocks, block_size, num_kv_heads, head_dim) < 1:
        raise ValueError(
            f"a cache of {num_blocks} blocks of {block_size} tokens, {num_kv_heads} heads of "
            f"{head_dim} cannot be made: all must be 1 or more"
        )
    sizes = (head_dim, head_dim if v_head_dim is None else v_head_dim)
    k_cache, v_cache = (
        _allocate((num_blocks, block_size, num_kv_heads, size), dtype, device, layout)
        for size in sizes
    )
    return k_cache, v_cache


#: Names of the logical dims of a cache in `Layout.dims`.
CACHE_DIMS = ("blocks", "tokens", "heads", "head_size")


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, layout: Layout | None
) -> Tensor:
    order = CACHE_DIMS if layout is None or not layout.dims else layout.dims
    if sorted(order) != sorted(CACHE_DIMS):
        raise ValueError(
            f"kv_block layout {layout.name if layout else ''!r} has dims {order}: expected an "
            f"order of {CACHE_DIMS}"
        )
    physical = torch.empty(
        [shape[CACHE_DIMS.index(dim)] for dim in order], dtype=dtype, device=device
    )
    return physical.permute([order.index(dim) for dim in CACHE_DIMS])
