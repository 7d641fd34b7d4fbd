"""Compiling Triton kernels for a chip that is not on this machine, through their host wrapper."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polysilicon.offline import triton_internals
from polysilicon.offline.stderr import captured_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from polysilicon.offline.triton_internals import Launch


@dataclass(frozen=True, kw_only=True)
class CompiledTriton:
    """What Triton's compiler made of one launched kernel. Nothing of it has run.

    Attributes:
        name: name of the kernel function.
        toolchain: the compiler, e.g. `triton 3.9`: other minor versions make other code.
        seconds: processor time of the compiler and the assemblers that it starts, nothing
            cached; other work on the machine doesn't count.
        grid: the grid of the launch; empty where the launch had an error before it was known.
        constants: the kernel's constexpr arguments, an autotuned configuration's among them.
        num_warps: warps of a program.
        num_stages: pipeline stages.
        shared_bytes: shared memory of a program; the compiler does not check it against the chip.
        asm: stage of the compiler (`ttir`, `llir`, the assembly, the binary …) → its output.
        diagnostics: all that the compiler said while it went on. Never ignore it: for instance,
            inline assembly of another vendor is reported here and leaves a kernel without stores.
        error: why there is no binary; empty where there is one.
    """

    name: str
    toolchain: str
    seconds: float
    grid: tuple[int, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 0
    num_stages: int = 0
    shared_bytes: int = 0
    asm: Mapping[str, str | bytes] = field(default_factory=dict)
    diagnostics: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", MappingProxyType(dict(self.constants)))
        object.__setattr__(self, "asm", MappingProxyType(dict(self.asm)))


def compile_triton(
    launch: Callable[[], object], *, backend: str, arch: str | int, warp_size: int
) -> list[CompiledTriton]:
    """Compiles every Triton kernel that `launch` launches, for a target, without running any.

    `launch` calls the kernels' own host wrapper, so that grids, strides, argument specialisation
    and the choice of configuration are those of production. Let it use meta tensors: they cost no
    memory at any size, and alignment and storage size count as on the chip, where an allocation
    is aligned. CPU tensors work too; their real addresses count. An `@triton.autotune` kernel is
    compiled in every configuration. A kernel launched twice with the same specialisation is
    compiled, and listed, once.

    There is no time limit: a compiler that hangs can only be killed from outside
    (`polysilicon compile` does). Standard error of the whole process is captured meanwhile.

    Args:
        launch: calls the host wrapper, e.g. `lambda: my_op(x, weight)`.
        backend: Triton's name of the backend.
        arch: the backend's name or number of the architecture.
        warp_size: threads of a warp on that architecture.

    Raises:
        ToolchainError: Triton is missing or of a version that is not supported, or interprets
            instead of compiling, or has no such backend.
        ValueError: nothing was launched.

    Example:
        ```python
        def offline(device):
            x = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
            return compile_triton(lambda: rms_norm(x), backend=..., arch=..., warp_size=...)
        ```
    """
    version = triton_internals.require_triton().__version__
    toolchain = "triton " + ".".join(version.split(".")[:2])
    found: list[CompiledTriton] = []
    seen: set[int] = set()

    def compile_one(launched: Launch) -> Any:
        """The compiled kernel, which the wrapper may look at; None where there is none."""
        result, kernel = _compile(launched, toolchain)
        if kernel is None or id(kernel) not in seen:
            found.append(result)
        seen.add(id(kernel))
        return kernel

    with triton_internals.offline(backend, arch, warp_size, compile_one):
        launch()
    if not found:
        raise ValueError(
            "compile_triton: launch() launched no Triton kernel; it must call the host wrapper "
            "itself, with arguments for which that launches one (a torch.library op runs its fake)"
        )
    return found


def _compile(launched: Launch, toolchain: str) -> tuple[CompiledTriton, Any]:
    grid: tuple[int, ...] = ()
    kernel, error = None, ""
    with captured_stderr() as said, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        start = _processor_seconds()
        try:
            grid = launched.grid()
            kernel = launched.compile()
        except Exception as problem:
            error = _text(problem)
        seconds = _processor_seconds() - start
    noted = [f"warning: {w.message}" for w in warned if not triton_internals.is_noise(w)]
    diagnostics = "\n".join(filter(None, (said[0].strip(), *noted)))
    if kernel is None:
        failed = CompiledTriton(
            name=launched.name,
            toolchain=toolchain,
            seconds=seconds,
            grid=grid,
            diagnostics=diagnostics,
            error=error,
        )
        return failed, None
    return CompiledTriton(
        name=launched.name,
        toolchain=toolchain,
        seconds=seconds,
        grid=grid,
        constants=launched.constants(kernel),
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        asm=dict(kernel.asm),
        diagnostics=diagnostics,
    ), kernel


def _processor_seconds() -> float:
    """Of this process, and of the children that it has waited for."""
    return sum(os.times()[:4])


def _text(problem: BaseException) -> str:
    """The error and its causes: Triton's own says where in the kernel, the cause says what."""
    texts = []
    cause: BaseException | None = problem
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}".strip())
        cause = cause.__cause__
    return "\n".join(texts)
