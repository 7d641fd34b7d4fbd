"""What `polysilicon compile` says of linear: the plan of each shape. Planned, not run.

The card's compiler is closed and needs its own machine, so nothing is compiled here: these are the
sizes, splits and bytes that the rules of the front end give.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from polysilicon.api import Compiled
from polysilicon_spyre.chips import SPYRE, STICK_BYTES
from polysilicon_spyre.division import divide, span_split, span_text
from polysilicon_spyre.layout import WEIGHT_ORDER, layout_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.api import Device

#: (in, out) of SmolLM2-135M and of Granite 8B: attention, both halves of the MLP, the head.
SHAPES = (
    *((576, 576), (576, 3072), (1536, 576), (576, 49152)),
    *((4096, 4096), (4096, 25600), (12800, 4096), (4096, 49152)),
)
ROWS = (1, 128)
KERNEL = "linear.spyre_sticks"
DTYPE = "float16"


def linear(device: Device) -> Iterator[Compiled]:
    """The plan of linear for each of a few models' shapes, at one row and at 128."""
    del device  # there is one generation of the card, and the simulator is of it
    for depth, out in SHAPES:
        for rows in ROWS:
            yield plan(rows, depth, out)


def plan(rows: int, depth: int, out: int) -> Compiled:
    """The plan of one product [rows, depth] × [depth, out] in float16."""
    began = time.perf_counter()
    x, weight, y = (
        layout_of((rows, depth), DTYPE),
        layout_of((out, depth), DTYPE, WEIGHT_ORDER),
        layout_of((rows, out), DTYPE),
    )
    columns, tiles = weight.device_size[0], x.device_size[0]
    # The table that prints it speaks of compiling; the name says what this is instead.
    variant = f"planned, not run: {rows} × {depth} → {out} {DTYPE}"
    if span_split(columns, depth) is None:
        problems = (span_text(columns, depth),)
        return Compiled(kernel=KERNEL, variant=variant, seconds=0, problems=problems)
    division = divide(rows, columns, tiles, depth)
    # Inputs that fill no stick: a buffer with whole ones is filled with zeros, the weight is
    # written over them, and the product reads the buffer.
    extra = tiles * weight.elems_per_stick - depth
    copied = STICK_BYTES * columns * (depth + 2 * (depth + extra)) if extra else 0
    layouts = (x, weight, y)
    facts: dict[str, int | str] = {
        "cores": division.cores,
        "idle_cores": SPYRE.cores - division.cores,
        "split_rows_columns_depth": "×".join(map(str, division.splits)),
        "weight_sticks": weight.sticks,
        "padding_bytes": sum(layout.padding_bytes for layout in layouts),
        "moved_bytes": sum(layout.device_bytes for layout in layouts) + copied,
    }
    seconds = time.perf_counter() - began
    return Compiled(kernel=KERNEL, variant=variant, seconds=seconds, facts=facts)
