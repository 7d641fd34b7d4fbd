"""All that core knows of Triton's inside: its driver, its launch path and its versions.

Fact by fact what the rest relies on, the same in the versions that `require_triton` lets through:
a launch `kernel[grid](…)` ends in `JITFunction.run(*args, grid=, warmup=, **kwargs)`, where
`warmup=True` specialises and compiles and stops; `Autotuner` and `Heuristics` wrap it; compiled
kernels are kept by the index of the driver's current device.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from polysilicon.errors import ToolchainError

if TYPE_CHECKING:
    import warnings
    from collections.abc import Callable, Iterator

#: Both ends are tested; a later version has to be tried first, because what is used is private.
OLDEST, TOO_NEW = "3.6", "3.10"

#: A device index of its own for each call: by it Triton would hand back another target's binary.
_indices = itertools.count(1 << 16)


def require_triton() -> Any:
    """The triton module.

    Raises:
        ToolchainError: it is missing, or of a version whose inside is not known here.
    """
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        raise ToolchainError(
            "compiling offline needs Triton, which is not installed: "
            f"pip install 'triton>={OLDEST},<{TOO_NEW}'"
        ) from error
    # A development build of the first version that is too new is too new as well.
    release = Version(Version(triton.__version__).base_version)
    if not Version(OLDEST) <= release < Version(TOO_NEW):
        raise ToolchainError(
            f"Triton {triton.__version__} is installed; compiling offline and interpreting are "
            f"known to work with {OLDEST} up to, not including, {TOO_NEW}: "
            f"pip install 'triton>={OLDEST},<{TOO_NEW}'"
        )
    return triton


@dataclass(frozen=True)
class Launch:
    """One launch of a jitted kernel that was stopped on its way to the driver."""

    kernel: Any
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def grid(self) -> tuple[int, ...]:
        """The grid, called as a real launch would call it."""
        grid = self.kwargs["grid"]
        if callable(grid):
            signature = self.kernel.signature
            named = {k: v for k, v in self.kwargs.items() if k in signature.parameters}
            bound = signature.bind(*self.args, **named)
            bound.apply_defaults()
            grid = grid(bound.arguments)
        return tuple(int(size) for size in grid)

    def compile(self) -> Any:
        return self.run(self.kernel, *self.args, **{**self.kwargs, "warmup": True})

    def constants(self, compiled: Any) -> dict[str, Any]:
        """Values of the constexpr arguments by name."""
        names = self.kernel.arg_names
        values = compiled.src.constants
        wanted = ((names[path[0]], value) for path, value in values.items() if len(path) == 1)
        return {name: value for name, value in wanted if name in self._constexprs()}

    def _constexprs(self) -> set[str]:
        return {param.name for param in self.kernel.params if param.is_constexpr}


@contextmanager
def offline(
    backend: str, arch: str | int, warp_size: int, compile_one: Callable[[Launch], Any]
) -> Iterator[None]:
    """Hands every launch to `compile_one`, for a target of whose chip there need be none here."""
    triton = require_triton()
    if triton.knobs.runtime.interpret:
        raise ToolchainError(
            "TRITON_INTERPRET=1 is set: kernels are interpreted, so nothing is compiled; "
            "compile offline in a process without it"
        )
    driver = _Driver(_target(backend, arch, warp_size), next(_indices))
    active, touched = triton.runtime.driver, set[Any]()

    def compile_and_remember(launched: Launch) -> Any:
        touched.add(launched.kernel)
        return compile_one(launched)

    with ExitStack() as stack:
        stack.enter_context(_nothing_cached(triton))
        stack.enter_context(_intercepted(compile_and_remember))
        # Not reset_active(): that would look for a real driver, and there may be none.
        stack.callback(active.set_active, active._active)
        active.set_active(driver)
        try:
            yield
        finally:
            for kernel in touched:
                kernel.device_caches.pop(driver.index, None)


def is_noise(warning: warnings.WarningMessage) -> bool:
    """A warning that is about Triton's future, not about the kernel."""
    return "TRITON_DEFAULT_FP_FUSION" in str(warning.message)


def _target(backend: str, arch: str | int, warp_size: int) -> Any:
    compiler = importlib.import_module("triton.backends.compiler")
    installed = importlib.import_module("triton.backends").backends
    target = compiler.GPUTarget(backend, arch, warp_size)
    if not any(entry.compiler.supports_target(target) for entry in installed.values()):
        raise ToolchainError(
            f"this Triton has no backend {backend!r}; installed are {', '.join(sorted(installed))}"
        )
    return target


@contextmanager
def _nothing_cached(triton: Any) -> Iterator[None]:
    """An empty disk cache: a kernel found there would be compiled, and reported on, by nobody."""
    folder = tempfile.TemporaryDirectory(prefix="polysilicon-triton-")
    with folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder.name
        yield


@contextmanager
def _intercepted(compile_one: Callable[[Launch], Any]) -> Iterator[None]:
    jit = importlib.import_module("triton.runtime.jit")
    autotuner = importlib.import_module("triton.runtime.autotuner")
    run, tune = jit.JITFunction.run, autotuner.Autotuner.run

    def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compile_one(Launch(self, run, args, kwargs))

    jit.JITFunction.run, autotuner.Autotuner.run = stopped, _every_config
    try:
        yield
    finally:
        jit.JITFunction.run, autotuner.Autotuner.run = run, tune


def _every_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `Autotuner.run`: each configuration once, none of them timed."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    kernel = None
    for config in self.prune_configs(kwargs):
        chosen = {**kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:  # it may set what the kernel is specialised on
            config.pre_hook({**self.nargs, **chosen})
        kernel = self.fn.run(*args, **chosen)
    self.nargs = None
    return kernel


class _Driver:
    """The part of a Triton driver that specialising and compiling ask for."""

    def __init__(self, target: Any, index: int) -> None:
        self.target = target
        self.index = index

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        del device
        return 0
