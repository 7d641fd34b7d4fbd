"""Where a Pallas kernel can run: on a TPU through torch_tpu, or in Pallas's interpreter.

Experimental: what is for a TPU was tried with torch_tpu 0.2 as far as it goes without one (the
op is made and traced, tests/runtime); nothing here was ever executed on a TPU.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from polysilicon.api import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

#: `fast` interprets a kernel as one JAX program; `strict` simulates memories and copies besides,
#: so that a read out of bounds raises, about ten times slower. In both, memory that nobody wrote
#: holds NaN.
INTERPRET = "POLYSILICON_TPU_INTERPRET"
_MODES = ("fast", "strict")


def interpreter() -> Literal["fast", "strict"] | None:
    """How the environment asks for the interpreter; None where it does not.

    Raises:
        DeviceError: the variable says something else.
    """
    asked = os.environ.get(INTERPRET, "")
    if asked and asked not in _MODES:
        raise DeviceError(f"{INTERPRET}={asked}: expected {' or '.join(_MODES)}, or unset it")
    return "strict" if asked == "strict" else "fast" if asked else None


def why_not() -> str | None:
    """Why no Pallas kernel can run in this process; None where one can."""
    if interpreter():
        if find_spec("jax"):
            return None
        return "jax is not installed: pip install 'polysilicon-tpu[interpret]'"
    missing = [name for name in ("torch_tpu", "jax") if not find_spec(name)]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} not installed: pip install 'polysilicon-tpu[runtime]' on a "
        f"TPU machine; elsewhere {INTERPRET}=fast runs it in Pallas's interpreter"
    )


def quiet_jax() -> None:
    """Before jax is imported to interpret: it is to use the CPU, and look for no TPU."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def activate() -> None:
    """Registers the torch device `tpu`; core calls it once, and only where a TPU is present.

    Raises:
        DeviceError: torch_tpu is missing, or torchax already owns the device slot it needs.
    """
    if "torchax" in sys.modules:
        raise DeviceError(
            "torchax is loaded in this process, and both it and torch_tpu take PyTorch's one "
            "slot for a private device: use one of them, in a process of its own"
        )
    if not find_spec("torch_tpu"):
        raise DeviceError(
            "a TPU is here and torch_tpu is not: pip install 'polysilicon-tpu[runtime]'"
        )
    import torch_tpu  # noqa: F401  # importing it registers the device


@functools.cache
def tpu_op(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a torch op on the device `tpu`; `activate()` came before.

    Args:
        name: `namespace::op`, new to torch.
        function: annotated with `jax.Array`, `float` …; torch_tpu makes the schema from that.
    """
    import torch

    op: Callable[..., Any] = torch.tpu.pallas.jax_op(name, function)  # type: ignore[attr-defined]
    return op
