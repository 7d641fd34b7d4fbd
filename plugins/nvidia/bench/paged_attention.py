"""Paged attention against torch's own attention, on one GPU: `python paged_attention.py [--sweep]`.

Both sides in one process on the same numbers; torch gets its keys and values dense and laid out
for it, which paging never has. Medians by device events over replayed CUDA graphs, the caches
rotated so that none is left in the L2. Ratios are torch's time ÷ ours: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polysilicon_nvidia.kernels import paged_attention as kernel
from polysilicon_nvidia.kernels.tiles import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

HEADS, KV_HEADS, BLOCK = 32, 8, 16
#: More than any L2 holds.
COLD_BYTES = 256 << 20
REPLAYS = 20


@dataclass(frozen=True)
class Case:
    """`queries` new tokens of each of `batch` sequences of `context` tokens."""

    batch: int
    queries: int
    context: int
    size: int = 128

    def __str__(self) -> str:
        return f"{self.batch:3} × {self.queries:5} over {self.context:6}, d {self.size}"

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * self.batch * self.context * KV_HEADS * self.size

    @property
    def operations(self) -> int:
        """Of both products, over the keys that each query sees."""
        seen = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * HEADS * self.size * seen


CASES = (
    *(Case(batch, 1, context) for batch in (1, 8, 16, 32, 64) for context in (1024, 4096, 8192)),
    Case(128, 1, 1024),
    Case(1, 1, 65536),
    Case(16, 1, 8192, 64),
    Case(16, 1, 8192, 256),
    Case(1, 1024, 1024),
    Case(1, 4096, 4096),
    Case(1, 16384, 16384),
    Case(8, 512, 4096),
    Case(1, 4096, 4096, 64),
    Case(1, 4096, 4096, 256),
)
#: What a sweep looks at, and the tiles that it tries: rows, keys, warps, stages.
SWEPT = (
    *(Case(8, 1, 8192), Case(32, 1, 4096), Case(16, 1, 8192, 64), Case(16, 1, 8192, 256)),
    *(Case(1, 4096, 4096), Case(8, 512, 4096), Case(1, 16384, 16384)),
    *(Case(1, 4096, 4096, 64), Case(1, 4096, 4096, 256)),
)
DECODE_TILES = tuple(itertools.product((16,), (32, 64, 128), (2, 4), (3, 5, 7)))
PREFILL_TILES = tuple(itertools.product((64, 128), (32, 64, 128), (4, 8), (3, 5)))


def paged(case: Case) -> dict[str, Any]:
    """The call, its blocks scattered over the cache."""
    blocks = case.batch * case.context // BLOCK
    tables = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(case.batch, -1)
    shape = (blocks, BLOCK, KV_HEADS, case.size)
    k_cache, v_cache = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    starts = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.queries
    tokens = case.batch * case.queries
    return {
        "q": torch.randn(tokens, HEADS, case.size, device="cuda", dtype=torch.bfloat16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables,
        "query_starts": starts,
        "kv_lengths": torch.full_like(starts[1:], case.context),
        "scale": case.size**-0.5,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "causal": True,
        "max_query": case.queries,
        "max_kv": case.context,
    }


def dense(case: Case, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers as torch's attention takes them, [batch, heads, tokens, size]."""
    tables = given["block_tables"].long()
    caches = (given[name][tables].flatten(1, 2) for name in ("k_cache", "v_cache"))
    k, v = (cache.transpose(1, 2).contiguous() for cache in caches)
    q = given["q"].view(case.batch, case.queries, HEADS, case.size).transpose(1, 2).contiguous()
    return q, k, v


def torchs(case: Case, backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's attention by one of its backends."""
    if 1 < case.queries < case.context:
        from torch.nn.attention.bias import causal_lower_right

        bias: Any = causal_lower_right(case.queries, case.context)
        rule: dict[str, Any] = {"attn_mask": bias}
    else:
        rule = {"is_causal": case.queries > 1}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out: Tensor = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **rule)
            return out

    return call


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one call, all of them captured in one graph that is replayed."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())  # which is still making the inputs
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (microseconds([lambda: target.copy_(source)] * 4) * 1e-6)


def rotated(case: Case) -> list[dict[str, Any]]:
    copies = max(2, math.ceil(COLD_BYTES / case.cache_bytes))
    return [paged(case) for _ in range(min(copies, 32))]


def compare(case: Case, bandwidth: float) -> str:
    """One line: both times, their ratio, and what ours reaches of the chip."""
    calls = rotated(case)
    found = kernel.paged_attention(**calls[0])[0]
    ours = microseconds([functools.partial(kernel.paged_attention, **given) for given in calls])
    laid_out = [dense(case, given) for given in calls]
    times: dict[str, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        attention = torchs(case, backend)
        try:
            wanted = attention(*laid_out[0]).transpose(1, 2).flatten(0, 1)
        except RuntimeError:
            continue  # this backend can't serve the case; the line shows which did
        error = float((found.float() - wanted.float()).abs().max())
        if error > 0.04:  # one unit in the last place of a large value
            raise ValueError(f"{case}: differs from torch's {backend.name} by {error:.3f}")
        runs = [functools.partial(attention, *given) for given in laid_out]
        times[backend.name.partition("_")[0].lower()] = microseconds(runs)
    best = min(times, key=lambda name: times[name])
    if case.queries == 1:
        reached = f"{case.cache_bytes / (ours * 1e-6) / bandwidth:5.2f} of copy"
    else:
        reached = f"{case.operations / (ours * 1e-6) / 1e12:5.0f} TFLOP/s"
    return f"{case} {ours:9.1f} {times[best]:9.1f} ({best:5}) {times[best] / ours:6.2f} {reached}"


def sweep(case: Case) -> Iterator[str]:
    """The fastest tiles of a case; one that doesn't fit the chip is left out, and counted."""
    calls, times, unfit = rotated(case), {}, 0
    runs = [functools.partial(kernel.paged_attention, **given) for given in calls]
    tiles = DECODE_TILES if case.queries == 1 else PREFILL_TILES
    for sizes, warps_per_sm in itertools.product(tiles, (8, 12)):
        tile = Tile(**dict(zip(("rows", "keys", "warps", "stages"), sizes, strict=True)))
        with (
            patch.object(kernel, "tile_for", return_value=tile),
            patch.object(kernel, "WARPS_PER_SM", warps_per_sm),
        ):
            try:
                times[sizes, warps_per_sm] = microseconds(runs)
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    raise
                unfit += 1
    for one in sorted(times, key=lambda one: times[one])[:6]:
        yield f"{case} {times[one]:9.1f} µs  {one[0]}, split for {one[1]} warps an SM"
    yield f"{case} {unfit} of {2 * len(tiles)} do not fit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles, too")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, heads {HEADS}/{KV_HEADS}, "
        f"bfloat16, pages of {BLOCK}; copy {bandwidth / 1e12:.2f} TB/s read and written"
    )
    print(f"{'batch × queries over context':33} {'ours µs':>9} {'torch µs':>9} {'':7} {'ratio':>6}")
    with torch.inference_mode():
        for case in CASES:
            print(compare(case, bandwidth), flush=True)
        for case in SWEPT if arguments.sweep else ():
            for line in sweep(case):
                print(line, flush=True)


if __name__ == "__main__":
    main()
