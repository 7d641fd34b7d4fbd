"""Layouts packed and unpacked over odd sizes and all dtypes; needs torch, not pytest."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polysilicon.calling import load_target
from polysilicon.layers.attention import allocate_kv_cache
from polysilicon.testing.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from polysilicon.records import Layout

CHECKS = ("round trip", "declared shape", "padding")
_DTYPES = ("float32", "bfloat16", "float16", "int8")
#: Per number of logical dims: nothing, one, primes, one off a tile on either side, whole tiles.
_SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((0, 64), (1, 1), (17, 31), (63, 65), (129, 127), (128, 256)),
    3: ((0, 16, 64), (1, 1, 1), (3, 17, 31), (2, 65, 63), (4, 64, 128)),
    4: ((1, 1, 1, 1), (3, 16, 2, 64), (5, 7, 3, 80)),
}
_RANKS = {"expert_weight": 3, "kv_block": 4}
_TILED = re.compile(r"^(\w+)/(\d+)$")


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One layout in one dtype."""

    layout: Layout
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.layout.name}-{self.dtype}"


def layout_cases(layouts: tuple[Layout, ...]) -> list[LayoutCase]:
    """Every layout in every dtype; one that declares dtypes among its facts, in those."""
    return [
        LayoutCase(layout=layout, dtype=dtype)
        for layout in layouts
        for dtype in str(layout.facts.get("dtypes") or " ".join(_DTYPES)).split()
    ]


def check_layout(case: LayoutCase, torch_device: str) -> tuple[Finding, ...]:
    """Every check of one layout in one dtype on every size."""
    layout, dtype = case.layout, getattr(torch, case.dtype)
    found = []
    for sizes in _SIZES[_RANKS.get(layout.role, 2)]:
        skipped = ""
        try:
            texts = dict(_size(layout, sizes, dtype, torch_device))
        except Exception as error:
            texts = {"round trip": f"it raised {type(error).__name__}: {error}"}
            skipped = "it did not run"
        details = (case.dtype, "x".join(map(str, sizes)))
        found += [
            Finding(
                names=(layout.name,),
                details=details,
                check=check,
                text=texts.get(check, ""),
                skipped="" if check in texts else skipped,
            )
            for check in CHECKS
        ]
    return tuple(found)


def _size(
    layout: Layout, sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, str]]:
    if layout.pack is None or layout.unpack is None:
        if layout.role == "kv_block" and all(sizes):
            yield from _cache(layout, sizes, dtype, device)
        return
    pack, unpack = load_target(layout.pack), load_target(layout.unpack)
    logical = _numbered(sizes, dtype, device)
    kept = logical.clone()
    physical = pack(logical)
    back = _unpacked(unpack, physical, sizes)
    if not torch.equal(logical, kept):
        yield "round trip", "pack changed the tensor that it was given"
    if back.shape != kept.shape or back.dtype != dtype or not torch.equal(back, kept):
        yield "round trip", f"unpack(pack(x)) is not x for shape {sizes}"
    if text := _other_shape(layout, tuple(physical.shape)):
        yield "declared shape", text
    if physical.dtype == dtype:
        ones = int(pack(torch.ones_like(kept)).ne(0).sum())
        if ones != kept.numel():
            yield "padding", f"{kept.numel()} elements became {ones} that are not zero"


def _numbered(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Neighbours differ in each dtype: 251 is prime to every tile, and fits int8 when shifted."""
    count = int(torch.Size(sizes).numel())
    return (torch.arange(count, device=device) % 251 - 125).to(dtype).view(sizes)


def _unpacked(unpack: Callable[..., Tensor], physical: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """An unpack with a second parameter is told the logical shape, which padding hides."""
    wants_shape = len(inspect.signature(unpack).parameters) > 1
    return unpack(physical, sizes) if wants_shape else unpack(physical)


def _other_shape(layout: Layout, shape: tuple[int, ...]) -> str:
    """How a packed shape differs from the declared dims, e.g. `("N/64", "K", "64")`."""
    if len(shape) != len(layout.dims):
        return f"pack gave {len(shape)} dims {shape}, declared are {layout.dims}"
    for dim, size in zip(layout.dims, shape, strict=True):
        if dim.isdigit() and int(dim) != size:
            return f"pack gave {shape}, declared is {layout.dims}: dim {dim} is {size}"
    tiles = [match[2] for dim in layout.dims if (match := _TILED.match(dim))]
    inner = [dim for dim in layout.dims if dim.isdigit()]
    # Tiles may be cut further: N/48 and K/16 with 8, 24, 2, 2 inside.
    if set(tiles) - set(inner) and _product(tiles) != _product(inner):
        return (
            f"declared dims {layout.dims} split by {', '.join(tiles)}, and the sizes inside "
            f"({', '.join(inner) or 'none'}) don't multiply to that"
        )
    return ""


def _product(sizes: Iterable[str]) -> int:
    return math.prod(map(int, sizes))


def _cache(
    layout: Layout, sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, str]]:
    """A layout that only orders the dims of a cache: the cache has the logical shape."""
    blocks, tokens, heads, size = sizes
    keys, _ = allocate_kv_cache(
        blocks, tokens, heads, size, dtype=dtype, device=device, layout=layout
    )
    if tuple(keys.shape) != sizes:
        yield "declared shape", f"a cache of {sizes} came with shape {tuple(keys.shape)}"
    keys.copy_(_numbered(sizes, dtype, device))
    if not torch.equal(keys, _numbered(sizes, dtype, device)):
        yield "round trip", f"a cache of {sizes} does not hold what was written to it"
