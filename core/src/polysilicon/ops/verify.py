"""Runs one kernel on one sample of its op and says what is wrong with it, if anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon import formats
from polysilicon.ops.contract import Op, Sample, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the reference makes of one sample: its results, and the arguments after the call."""

    results: tuple[Tensor, ...]
    arguments: Mapping[str, Any]


def expect(op: Op, sample: Sample) -> Expected:
    """Runs the reference on copies of the sample's arguments."""
    arguments = copied(sample.kwargs)
    return Expected(results=as_results(op.reference(**arguments)), arguments=arguments)


def mismatch(op: Op, kernel: Callable[..., Any], sample: Sample, dtype: torch.dtype) -> str | None:
    """The first way in which `kernel` breaks the contract of `op` on `sample`, None if none.

    Checks number, shape, dtype and contiguity of the results, values against the reference,
    that arguments not named in `op.mutates` keep their bits, and that mutated ones agree.
    """
    expected, given = expect(op, sample), copied(sample.kwargs)
    actual = as_results(kernel(**given))
    return next((text for _, text in breaches(op, sample, dtype, expected, actual, given)), None)


def breaches(
    op: Op,
    sample: Sample,
    dtype: torch.dtype,
    expected: Expected,
    actual: Sequence[Tensor],
    given: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Every breach of the contract by one call, as (`form`, `values` or `arguments`, text).

    Args:
        op: the op that was called.
        sample: the arguments before the call.
        dtype: that of the sample.
        expected: what the reference made of it.
        actual: the results of the call.
        given: the arguments after the call.
    """
    bound = tolerance(dtype, op.reduction(sample.kwargs))
    dense = op.contiguous and all(
        v.is_contiguous() for v in sample.kwargs.values() if isinstance(v, Tensor)
    )
    if len(actual) != len(expected.results):
        yield "form", f"returned {len(actual)} results, expected {len(expected.results)}"
    else:
        for index, (result, wanted) in enumerate(zip(actual, expected.results, strict=True)):
            want_dtype = _result_dtype(op.results[index], sample, dtype)
            if text := _form(result, wanted, want_dtype, dense):
                yield "form", f"result {index}: {text}"
            if result.shape == wanted.shape and (text := _values(result, wanted, bound)):
                yield "values", f"result {index}: {text}"
    if text := _arguments(op, sample.kwargs, given, expected.arguments, bound):
        yield "arguments", text


def _result_dtype(named: str, sample: Sample, dtype: torch.dtype) -> torch.dtype:
    if named == "input":
        return dtype
    if named in sample.kwargs:  # an argument that is a format
        named = formats.parse(sample.kwargs[named]).dtype
    found: torch.dtype = getattr(torch, named)
    return found


def copied(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with every tensor copied into memory of the same form (strides and offset)."""
    return {k: _copy(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}


def _copy(x: Tensor) -> Tensor:
    room = torch.empty(0, dtype=x.dtype, device=x.device)
    storage = x.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return room.set_(storage, x.storage_offset(), x.shape, x.stride())


def as_results(value: Any) -> tuple[Tensor, ...]:
    """What an op returned as a tuple of tensors; empty for ops that only mutate."""
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _form(result: Tensor, wanted: Tensor, dtype: torch.dtype, dense: bool) -> str | None:
    if result.shape != wanted.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(wanted.shape)}"
    if result.dtype != dtype:
        return f"dtype {result.dtype}, expected {dtype}"
    if dense and not result.is_contiguous():
        return f"strides {result.stride()} are not contiguous although all arguments are"
    return None


def _values(result: Tensor, wanted: Tensor, bound: tuple[float, float]) -> str | None:
    """Absolute errors are measured against the largest number of the row: sums may cancel."""
    if not result.numel():
        return None
    got, want = result.double(), wanted.double()
    rounded = wanted.to(result.dtype).double()  # float16 overflows where float64 does not
    finite = rounded.isfinite()
    if not torch.equal(finite, got.isfinite()) or not same_bits(got[~finite], rounded[~finite]):
        return "differs from the reference in infinities or NaNs"
    largest = torch.where(finite, want, 0).abs()
    scale = largest.amax(-1, keepdim=True) if want.dim() else largest
    room = (
        bound[0] * largest
        + bound[1] * scale
        + torch.finfo(torch.float16).smallest_normal * (bound[0])
    )
    if result.dtype in _CODES:
        return _codes(got, want, room, _CODES[result.dtype])
    excess = torch.where(finite, (got - want).abs() - room, 0)
    if excess.max() <= 0:
        return None
    worst = int(excess.argmax())
    return (
        f"got {got.flatten()[worst]:.9g}, expected {want.flatten()[worst]:.9g} at flat index "
        f"{worst}; rtol {bound[0]:.3g}, {int((excess > 0).sum())} of {got.numel()} differ"
    )


#: Dtypes of codes → (relative, absolute) distance of two neighbours.
_CODES = {
    torch.int8: (0.0, 1.0),
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9),
    torch.float8_e4m3fnuz: (2.0**-3, 2.0**-10),
}


def _codes(got: Tensor, want: Tensor, room: Tensor, step: tuple[float, float]) -> str | None:
    """Codes may be a step beyond `room` off, where a number lay near the middle of two.

    Never a quarter of them: a kernel that rounds otherwise than to the nearest has half of its
    codes off.
    """
    off = (got != want) & want.isfinite()
    excess = (got - want).abs() - room - step[0] * torch.maximum(got.abs(), want.abs()) - step[1]
    excess = torch.where(off, excess, -1)
    if int(off.sum()) <= max(1, got.numel() // 4) and excess.max() <= 0:
        return None
    worst = int((excess if excess.max() > 0 else off.double()).argmax())
    return (
        f"got code {got.flatten()[worst]:.9g}, expected {want.flatten()[worst]:.9g} at flat index "
        f"{worst}; {int(off.sum())} of {got.numel()} differ"
    )


def _arguments(
    op: Op,
    original: Mapping[str, Any],
    given: Mapping[str, Any],
    expected: Mapping[str, Any],
    bound: tuple[float, float],
) -> str | None:
    for name, value in original.items():
        if not isinstance(value, Tensor):
            continue
        if name in op.mutates:
            problem = _values(given[name], expected[name], bound)
            if problem:
                return f"mutated argument {name}: {problem}"
        elif not same_bits(given[name], value):
            return f"changed its argument {name}, which the op does not list as mutated"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaNs are equal to NaNs."""
    if a.dtype == b.dtype and a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.float(), b.float()  # torch compares no float8 with itself
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
