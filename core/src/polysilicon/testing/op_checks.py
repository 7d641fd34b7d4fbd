"""A kernel run on every sample of its op: all that is wrong, and nothing that needs pytest."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polysilicon import ops
from polysilicon.calling import load_kernel, load_target, takes_packed
from polysilicon.errors import LayoutError
from polysilicon.ops.contract import Sample
from polysilicon.ops.samples import shifted, strided
from polysilicon.ops.verify import as_results, breaches, copied, expect, same_bits
from polysilicon.packed import Packed, packed_arguments, physical_arguments
from polysilicon.testing.facts import problem_of, tokens_of
from polysilicon.testing.findings import Finding
from polysilicon.testing.poison import Poisoned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from polysilicon.ops.contract import Op
    from polysilicon.ops.verify import Expected
    from polysilicon.records import Kernel, Layout, Problem

#: What is looked at, in the order in which a failure is worth reading.
CHECKS = ("runs", "form", "written", "values", "arguments", "determinism", "shape function")
#: Whether a kernel was looked at at all; one finding a case.
CLAIM = "claim"
#: Arguments whose memory form is a layout's business, not the caller's.
_STORED = frozenset({"weight", "k_cache", "v_cache"})
#: Token counts of calls with a vendor's own shapes: one, a prime, one more than a tile.
_COUNTS = (1, 7, 17)


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One kernel in one dtype."""

    kernel: Kernel
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.kernel.name}-{self.dtype}"


def op_cases(kernels: Iterable[Kernel]) -> list[OpCase]:
    """Every kernel of an op of this core in every dtype that op and kernel share."""
    return [
        OpCase(kernel=kernel, dtype=dtype)
        for kernel in kernels
        if kernel.op in ops.NAMES
        for dtype in (str(dtype).removeprefix("torch.") for dtype in ops.get(kernel.op).dtypes)
        if not kernel.dtypes or dtype in kernel.dtypes
    ]


def check_kernel(
    case: OpCase,
    torch_device: str,
    problems: Sequence[Problem] = (),
    offered: Mapping[str, Layout] | None = None,
) -> tuple[Finding, ...]:
    """Every check of one kernel in one dtype on every sample.

    Args:
        case: the kernel and the dtype.
        torch_device: where it runs.
        problems: further shapes to run it on.
        offered: the device's layouts by name, for a kernel that takes arguments packed.
    """
    kernel, device = case.kernel, torch.device(torch_device)
    names = (kernel.name, kernel.op)
    try:
        calls = _calls(kernel, offered or {})
    except Exception as error:
        text = f"importing {kernel.target} raised {type(error).__name__}: {error}"
        return (Finding(names=names, details=(case.dtype,), check="runs", text=text),)
    asked = tuple(problem for problem in problems if problem.op == kernel.op)
    found = []
    for sample, expected in judged(kernel.op, case.dtype, device, asked):
        details = (case.dtype, sample.name)
        refused = _refused(kernel, sample, case.dtype)
        if refused:
            found.append(Finding(names=names, details=details, check="runs", skipped=refused))
            continue
        with torch.inference_mode():
            texts = _call(kernel, calls, sample, expected, getattr(torch, case.dtype))
        not_run = "it did not run" if "runs" in texts else ""
        found += [
            Finding(
                names=names,
                details=details,
                check=check,
                text=texts.get(check, ""),
                skipped="" if check in texts else not_run,
            )
            for check in CHECKS
        ]
    text = ""
    if all(finding.skipped for finding in found):
        text = "its claim covers no sample: give DeviceUnderTest problems that it serves"
    found.append(Finding(names=names, details=(case.dtype,), check=CLAIM, text=text))
    return tuple(found)


def _refused(kernel: Kernel, sample: Sample, dtype: str) -> str:
    """Why a sample lies outside of what a kernel claims; empty where it is held to it."""
    op = ops.get(kernel.op)
    if kernel.tokens is not None:
        low, high = kernel.tokens
        # A call without tokens goes to the kernel of the lowest counts.
        if not (low if low > 1 else 0) <= tokens_of(op, sample) <= high:
            return f"it serves {low}–{high} tokens"
    if kernel.supports is None:
        return ""
    return kernel.supports(problem_of(op, sample, dtype)) or ""


@dataclass(frozen=True, kw_only=True)
class _Calls:
    """A kernel by itself and as a layer calls it, and the layouts of what it takes packed."""

    bare: Callable[..., Any]
    bound: Callable[..., Any]
    layouts: Mapping[str, Layout]


def _calls(kernel: Kernel, offered: Mapping[str, Layout]) -> _Calls:
    op = ops.get(kernel.op)
    missing = [name for name in kernel.layouts.values() if name not in offered]
    if missing:
        raise LayoutError(
            f"it takes arguments in {', '.join(missing)}, and polysilicon_layouts offers "
            f"{', '.join(offered) or 'none'} on this device"
        )
    return _Calls(
        bare=load_target(kernel.target),
        bound=takes_packed(op, kernel.name, kernel.layouts, load_kernel(kernel)),
        layouts={argument: offered[name] for argument, name in kernel.layouts.items()},
    )


def _unpacked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments after a call as the reference knows them."""
    return {name: v.unpack() if isinstance(v, Packed) else v for name, v in given.items()}


def _lossy(layouts: Mapping[str, Layout], sample: Sample) -> str:
    """Which argument is changed by being packed and unpacked, without any kernel."""
    given = copied(sample.kwargs)
    back = _unpacked(packed_arguments(layouts, given))
    for argument, layout in layouts.items():
        kept = sample.kwargs[argument]
        if back[argument].shape != kept.shape or not same_bits(back[argument], kept):
            return (
                f"unpack(pack({argument})) of layout {layout.name} is not {argument}: mend the "
                "layout first, LayoutSuite says for which sizes"
            )
    return ""


def _call(
    kernel: Kernel, calls: _Calls, sample: Sample, expected: Expected, dtype: torch.dtype
) -> dict[str, str]:
    """Check → what is wrong, of two calls: bare in poisoned memory, then as a layer calls it."""
    op = ops.get(kernel.op)
    try:
        one, other = (packed_arguments(calls.layouts, copied(sample.kwargs)) for _ in range(2))
        with Poisoned():
            results = as_results(calls.bare(**physical_arguments(one)))
        again = as_results(calls.bound(**other))
        first, second = _unpacked(one), _unpacked(other)
    except Exception as error:
        return {"runs": f"it raised {type(error).__name__}: {error}"}
    texts: dict[str, str] = {}
    for call, after in ((results, first), (again, second)):
        for check, text in breaches(op, sample, dtype, expected, call, after):
            texts.setdefault(check, text)
    if "arguments" in texts and (text := _lossy(calls.layouts, sample)):
        texts["arguments"] = text
    if text := _unwritten(expected.results, results):
        texts["written"] = text
    if kernel.deterministic and not _same(op, (results, first), (again, second)):
        texts["determinism"] = "two calls gave different bits"
    if kernel.fake is not None and (
        text := _fake_differs(kernel.fake, physical_arguments(one), results)
    ):
        texts["shape function"] = text
    return texts


def _unwritten(wanted: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    for index, (result, want) in enumerate(zip(results, wanted, strict=False)):
        if result.shape != want.shape or not result.is_floating_point():
            continue
        left = int((result.isnan() & ~want.isnan()).sum())
        if left:
            return f"result {index}: {left} of {result.numel()} elements were not written"
    return ""


def _same(
    op: Op,
    one: tuple[Sequence[Tensor], dict[str, Any]],
    other: tuple[Sequence[Tensor], dict[str, Any]],
) -> bool:
    pairs = [*zip(one[0], other[0], strict=False)]
    pairs += [(one[1][name], other[1][name]) for name in op.mutates]
    return all(a.shape == b.shape and same_bits(a, b) for a, b in pairs)


def _fake_differs(fake: str, arguments: Mapping[str, Any], results: Sequence[Tensor]) -> str:
    """How the shape function's answer differs from the kernel's, in what a compiler relies on."""
    with FakeTensorMode() as mode:
        given = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        try:
            told = as_results(load_target(fake)(**given))
        except Exception as error:
            return f"it raised {type(error).__name__}: {error}"
    if len(told) != len(results):
        return f"it tells of {len(told)} results, the kernel returns {len(results)}"
    for index, (said, real) in enumerate(zip(told, results, strict=True)):
        if _told_form(said) != _told_form(real):
            return f"result {index}: it tells {_told_form(said)}, the kernel {_told_form(real)}"
    return ""


def _told_form(x: Tensor) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    # The stride of a dim of size one, or of an empty tensor, means nothing.
    strides = [s if n > 1 and x.numel() else 0 for s, n in zip(x.stride(), x.shape, strict=True)]
    return tuple(x.shape), x.dtype, tuple(strides)


# --- samples -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=6)
def judged(
    op: str, dtype: str, device: torch.device, problems: tuple[Problem, ...]
) -> list[tuple[Sample, Expected]]:
    """Samples with what the reference makes of them: shared by all kernels of an op."""
    contract = ops.get(op)
    return [
        (sample, expect(contract, sample))
        for sample in all_samples(contract, getattr(torch, dtype), device, problems)
    ]


def all_samples(
    op: Op, dtype: torch.dtype, device: torch.device, problems: Iterable[Problem] = ()
) -> Iterator[Sample]:
    """The op's own samples, one of them in further memory forms, and the problems' shapes."""
    own = list(op.samples(dtype, device))
    yield from own
    yield from _forms(op, max(own, key=lambda sample: _prime_first(tokens_of(op, sample))))
    for problem in problems:
        if op.inputs is None:
            raise ValueError(f"{op.name} can't make calls of a problem's shapes: leave it out")
        low, high = problem.tokens
        for count in sorted({n for n in (low, *_COUNTS) if low <= n <= high}):
            kwargs = op.inputs(problem, count, dtype, device)
            yield Sample(name=f"{dict(problem.facts)} {count} tokens", kwargs=kwargs)


def _prime_first(tokens: int) -> tuple[bool, int]:
    return tokens in (3, 5, 7, 13, 17), tokens


def _forms(op: Op, sample: Sample) -> Iterator[Sample]:
    """A sample with its activations strided, offset and expanded."""
    first, *others = sample.kwargs
    moved = [first, *(name for name in others if _is_activation(op, name, sample.kwargs[name]))]
    for form, make in (("strided", strided), ("offset", shifted)):
        changed = {name: make(sample.kwargs[name]) for name in moved}
        yield Sample(name=f"all {form}", kwargs={**sample.kwargs, **changed})
    changed = {first: _expanded(sample.kwargs[first])}
    yield Sample(name=f"{first} expanded", kwargs={**sample.kwargs, **changed})


def _is_activation(op: Op, name: str, value: Any) -> bool:
    if name in _STORED or name in op.mutates or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and value.dim() > 1


def _expanded(x: Tensor) -> Tensor:
    """The first slice of the first dim that has more than one, repeated with stride 0."""
    dim = next((dim for dim, size in enumerate(x.shape) if size > 1), 0)
    return x.narrow(dim, 0, 1).expand(x.shape)
