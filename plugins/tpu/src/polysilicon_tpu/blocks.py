"""How many rows of a tensor a kernel takes at once, so that it fits vector memory on every TPU."""

from __future__ import annotations

from polysilicon_tpu.chips import LANES, SMALLEST_SCOPED_VMEM, SUBLANES

#: Half for one block in flight; the compiler's own needs (spills, semaphores) get the rest.
_BUDGET = SMALLEST_SCOPED_VMEM // 2
#: More rows than this hide no further latency.
_MOST_ROWS = 256


def bytes_per_row(hidden: int, itemsize: int) -> int:
    """Vector memory that one row of a row-wise kernel takes.

    Argument and result twice each, as the next block is fetched while one is worked on, and two
    float32 copies of the row. Measured: 0.6 to 1.0 of this on v4 to v7x.
    """
    return -(-hidden // LANES) * LANES * (4 * itemsize + 2 * 4)


def block_rows(rows: int, hidden: int, itemsize: int) -> int:
    """Rows of one block: all of few rows, else a multiple of 8 that fits half of vector memory."""
    fit = _BUDGET // bytes_per_row(hidden, itemsize) // SUBLANES * SUBLANES
    return min(rows, max(SUBLANES, min(_MOST_ROWS, fit)))


def too_wide(hidden: int, itemsize: int) -> str | None:
    """Why even the smallest block of such rows does not fit a TPU, None where it does."""
    need = SUBLANES * bytes_per_row(hidden, itemsize)
    if need <= SMALLEST_SCOPED_VMEM:
        return None
    return (
        f"hidden size {hidden}: a block of {SUBLANES} rows takes {need >> 20} MiB of vector "
        f"memory, and a kernel may use {SMALLEST_SCOPED_VMEM >> 20} MiB"
    )
