"""Triton's interpreter made fit for tests: kernels run on CPU tensors, bfloat16 included.

Call `activate()` at the top of `conftest.py`, before anything imports Triton:

    ```python
    from polysilicon.testing import triton_interpreter

    triton_interpreter.activate()
    ```

The interpreter keeps bfloat16 as 16-bit integers, computes on them as on integers, and rounds
towards zero when it makes them, all without a word; some numbers it casts to float8 wrongly. Here
`tl.dot` and casts of bfloat16, and casts to float8, are made right, and other arithmetic on
bfloat16 raises: a kernel widens to float32 after its loads and narrows at its stores. Results are
the interpreter's: they show what a kernel means, not what a compiler makes of it, and nothing of
its speed.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from polysilicon.errors import ToolchainError
from polysilicon.offline.triton_internals import require_triton

_active = False


def activate() -> None:
    """Turns the interpreter on for this process, and proves that bfloat16 and float8 are right.

    A second call does nothing. Child processes inherit `TRITON_INTERPRET=1`; one that compiles
    must be started without it.

    Raises:
        ToolchainError: Triton is missing, of a version that is not supported, or was imported
            before, when its kernels had already been made for the compiler.
    """
    global _active
    if _active:
        return
    if "triton" in sys.modules:
        raise ToolchainError(
            "Triton is already imported, and decides at import whether it interprets: call "
            "polysilicon.testing.triton_interpreter.activate() first in conftest.py"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    require_triton()
    mend()
    importlib.import_module("polysilicon.testing.triton_canary").check()
    _active = True


def mend() -> None:
    """Makes bfloat16 right in the interpreter of an imported Triton; `activate()` calls it."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _mend_values(interpreter)
    _mend_float8(interpreter)
    _mend_loops(interpreter)
    _refuse_arithmetic(interpreter)


def _mend_values(interpreter: Any) -> None:
    """Products and casts: what a kernel that computes in float32 still does with bfloat16."""
    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    dot, cast = builder.create_dot, builder.cast_impl
    bfloat16, float32 = language.bfloat16, language.float32

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        return interpreter.TensorHandle(_widen(handle.data), float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, widened(a), widened(b), *more)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        source = widened(source)
        if target.scalar != bfloat16:
            return cast(self, source, target)
        if source.dtype.scalar != float32:
            source = cast(self, source, float32)
        return interpreter.TensorHandle(_narrow(source.data), bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


def _mend_float8(interpreter: Any) -> None:
    """Casts to 8 bits, rounded to the nearest; beyond what the format holds they are as torch's."""
    torch = importlib.import_module("torch")
    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    cast, towards_zero = builder.create_fp_to_fp, interpreter._ir.ROUNDING_MODE.RTZ
    formats = {
        language.float8e4nv: torch.float8_e4m3fn,
        language.float8e4b8: torch.float8_e4m3fnuz,
        language.float8e5: torch.float8_e5m2,
        language.float8e5b16: torch.float8_e5m2fnuz,
    }

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar not in formats or rounding == towards_zero:
            return cast(self, source, target, rounding)
        wide = self.cast_impl(source, language.float32).data
        codes = torch.tensor(wide).to(formats[target.scalar]).view(torch.uint8).numpy()
        return interpreter.TensorHandle(codes, target.scalar)

    builder.create_fp_to_fp = create_fp_to_fp


def _mend_loops(interpreter: Any) -> None:
    """`range()` up to an argument, which with Triton 3.6 and NumPy from 2.4 on raises."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _refuse_arithmetic(interpreter: Any) -> None:
    builder, reductions = interpreter.InterpreterBuilder, interpreter.ReduceScanOpInterface
    binary, unary = builder.binary_op, builder.unary_op
    check = reductions.check_tensor

    def refuse(*operands: Any) -> None:
        if any(operand.dtype.scalar == interpreter.tl.bfloat16 for operand in operands):
            raise TypeError(
                "the interpreter computes on bfloat16 as on integers: load, then .to(tl.float32), "
                "and narrow only at the store"
            )

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        refuse(left, right)
        return binary(self, left, right, op)

    def unary_op(self: Any, operand: Any, op: Any) -> Any:
        refuse(operand)
        return unary(self, operand, op)

    def check_tensor(self: Any, tensors: Any) -> Any:
        refuse(*tensors)
        return check(self, tensors)

    builder.binary_op, builder.unary_op = binary_op, unary_op
    reductions.check_tensor = check_tensor


def _widen(bits: Any) -> Any:
    """float32 of bfloat16 bits, which are its upper half."""
    return (bits.astype("uint32") << 16).view("float32")


def _narrow(values: Any) -> Any:
    """bfloat16 bits of float32, rounded to the nearest, ties to even, as the chips do."""
    bits = values.view("uint32")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")
    # Rounding up could carry a NaN into an infinity; keep its sign and make it quiet.
    rounded[values != values] = (bits[values != values] >> 16).astype("uint16") | 0x40
    return rounded
