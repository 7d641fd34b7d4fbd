"""Programs for the compiler, built in its own process; see `polysilicon_tpu.compiled.Program`."""

from __future__ import annotations

import os
import time
from typing import Any

import jax


def arguments(*, shapes: str, dtype: str) -> tuple[Any, Any]:
    """A program that takes arrays of these shapes (`2x3 17`) and gives back the first."""
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split()]
    return lambda *arrays: arrays[0], [(size, dtype) for size in sizes]


def hangs() -> tuple[Any, Any]:
    """Stands for a program on which the compiler never ends."""
    time.sleep(600)
    raise AssertionError("nobody waits this long")


def aborts() -> tuple[Any, Any]:
    """Stands for a program of which the compiler dies."""
    os.abort()


def fine() -> tuple[Any, Any]:
    """A program without a kernel."""
    return lambda x: jax.numpy.tanh(x), [((8, 128), "float32")]
