"""The kernels' records: what they claim, readable without Triton or torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from polysilicon.api import Kernel
from polysilicon_nvidia.chips import ARCHES

if TYPE_CHECKING:
    from polysilicon.api import Device, Problem

#: Largest head, and largest number of heads that share a key head, for which there are tiles.
MOST_SIZE = 256
MOST_GROUP = 128


def kernels(device: Device) -> list[Kernel]:
    """Every kernel of this plugin; what a device is too old for is refused with that reason."""
    return [
        Kernel(
            op="paged_attention",
            name="paged_attention.nvidia_triton",
            target="polysilicon_nvidia.kernels.paged_attention:paged_attention",
            device="nvidia",
            dtypes=frozenset({"float32", "float16", "bfloat16"}),
            supports=functools.partial(_paged_attention, device.arch),
            form="opaque",
            fake="polysilicon_nvidia.kernels.paged_attention:fake",
            # Split over the largest chip, tiles of 128 rows of 256 + 1 float32 numbers.
            workspace_bytes=256 << 20,
            offline="polysilicon_nvidia.compiled:paged_attention",
            note="run on an H200; elsewhere compiled for sm80 to sm120, not run",
        )
    ]


def _paged_attention(arch: str, problem: Problem) -> str | None:
    """Why paged_attention.nvidia_triton can't serve a problem; None where it can."""
    if arch not in ARCHES:
        return f"compiles for {', '.join(ARCHES)}, this is {arch}"
    if problem.formats:
        return f"takes a cache in the queries' dtype, not {', '.join(sorted(problem.formats))}"
    for fact in ("head_size", "v_head_size"):
        size = int(problem.fact(fact) or 0)
        if size > MOST_SIZE:
            return f"{fact} is {size}: there are tiles up to {MOST_SIZE}"
    heads = int(problem.fact("heads") or 1)
    kv_heads = int(problem.fact("kv_heads") or heads)
    if heads > kv_heads * MOST_GROUP:
        return f"{heads} heads share {kv_heads} key heads: a tile holds {MOST_GROUP} for each"
    return None
