# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Parameters of Triton's functions can't be annotated: an annotation is a type of its language.
"""What exported programs call, in place of the helpers of Helion and Inductor.

None of it is `libdevice`, which the interpreter does not know and which differs between chips.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Added to a float32 below 2**22 and taken away again, it leaves the nearest whole number.
WHOLE = tl.constexpr(1.5 * 2**23)


def launch(kernel, grid, *arguments, **options):
    """Starts a program; what an exported host function launches by."""
    kernel[grid](*arguments, **options)


@triton.jit
def maximum(a, b):
    """The larger number; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """The smaller number; NaN where one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_propagate_nan(x, axis: tl.constexpr):
    """The largest number along an axis; NaN where there is one."""
    return tl.reduce(x, axis, maximum)


@triton.jit
def quotient(a, b):
    """a // b of whole numbers that are not negative."""
    return a // b


@triton.jit
def nearest(x):
    """The nearest whole number of a float32 below 2**22, ties to even."""
    return (x + WHOLE) - WHOLE
