"""rms_norm as a Pallas kernel: rows in blocks, a whole row at once. Needs jax, not torch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from polysilicon_tpu.blocks import block_rows
from polysilicon_tpu.chips import LANES
from polysilicon_tpu.layout import TpuTiling

#: What the kernel is called in a compiled program.
CALL = "polysilicon_rms_norm"


def _normalise(
    x_ref: Any,  # [block, hidden], or [hidden, block]
    *refs: Any,  # weight of one row or column where there is one, then the result
    axis: int,
    eps: float,
    offset: float,
) -> None:
    # Rows beyond the last hold anything, are computed like the others, and are never stored.
    *weight_ref, out_ref = refs
    x = x_ref[...].astype(jnp.float32)
    mean = jnp.sum(x * x, axis=axis, keepdims=True) / x.shape[axis]
    y = x * jax.lax.rsqrt(mean + eps)
    if weight_ref:
        y = y * (weight_ref[0][...].astype(jnp.float32) + offset)
    out_ref[...] = y.astype(out_ref.dtype)


def _call(x: jax.Array, weight: jax.Array | None, eps: float, offset: float, how: Any) -> jax.Array:
    """Along the dim that the compiler keeps innermost, so that no array is copied around the call.

    It swaps the dims of an array where that pads less: 1024 rows of 576 lie as 576 × 1024. There a
    kernel over rows would cost two copies of the activations.
    """
    rows, hidden = x.shape
    size = x.dtype.itemsize
    block = block_rows(rows, hidden, size)
    # Rows that lie along the lanes are taken all, or in whole tiles, if one fits.
    columns = rows if block == rows else block // LANES * LANES
    swapped = columns > 0 and TpuTiling(shape=x.shape, dtype=x.dtype.name).order == (1, 0)
    weights = () if weight is None else (weight.reshape((hidden, 1) if swapped else (1, hidden)),)
    if swapped:
        x, block = x.T, columns
        by_rows = pl.BlockSpec((hidden, block), lambda i: (0, i))
    else:
        by_rows = pl.BlockSpec((block, hidden), lambda i: (i, 0))
    call = pl.pallas_call(
        functools.partial(_normalise, axis=0 if swapped else 1, eps=eps, offset=offset),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(rows, block),),
        in_specs=[by_rows, *(pl.BlockSpec(w.shape, lambda i: (0, 0)) for w in weights)],
        out_specs=by_rows,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * hidden,
            transcendentals=rows,
            bytes_accessed=(2 * rows + len(weights)) * hidden * size,
        ),
        interpret=how,
        name=CALL,
    )
    result: jax.Array = call(x, *weights)
    return result.T if swapped else result


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, offset: float) -> jax.Array:
    """For a TPU: x [rows, hidden], weight [hidden] or None. torch_tpu reads the annotations."""
    return _call(x, weight, eps, offset, False)


@functools.partial(jax.jit, static_argnames=("eps", "offset", "strict"))
def interpreted(
    x: jax.Array, weight: jax.Array | None, *, eps: float, offset: float, strict: bool
) -> jax.Array:
    """The same kernel in Pallas's interpreter."""
    return _call(x, weight, eps, offset, pltpu.InterpretParams() if strict else True)


def program(*, rows: int, hidden: int, dtype: str, weight: bool = True) -> tuple[Any, Any]:
    """What the compiler is given: a function, and shape and dtype of each argument."""

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        return rms_norm(x, weights[0] if weights else None, 1e-6, 0.0)

    arguments = [((rows, hidden), dtype), ((hidden,), dtype)]
    return run, arguments if weight else arguments[:1]
