"""What the compiler makes of the kernels, for a chip that need not be here.

Call your compiler where arithmetic stands for it, and make a problem of every limit that is passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.api import Compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.api import Device

#: Widths of the models to compile for.
WIDTHS = (4096, 16384)


def rms_norm(device: Device) -> Iterator[Compiled]:
    """One variant a width: a row stays in the scratchpad, in float32."""
    for width in WIDTHS:
        yield _judged(device, "rms_norm.acme", f"width {width} float32", 4 * width)


def _judged(device: Device, kernel: str, variant: str, used: int) -> Compiled:
    limit = int(device.facts["scratch_bytes"] or 0)
    too_much = f"needs {used} bytes of scratchpad, {device.name} has {limit}"
    return Compiled(
        kernel=kernel,
        variant=variant,
        seconds=0.0,
        facts={"shared_bytes": used},
        problems=(too_much,) if used > limit else (),
    )
