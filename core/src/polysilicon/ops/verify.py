"""Runs one kernel on one sample of its op and says what is wrong with it, if anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def mismatch(op: Op, kernel: Callable[..., Any], sample: Sample, dtype: torch.dtype) -> str | None:
    """The first way in which `kernel` breaks the contract of `op` on `sample`, None if none.

    Checks number, shape, dtype and contiguity of the results, values against the reference,
    that arguments not named in `op.mutates` keep their bits, and that mutated ones agree.
    """
    expected_args, given = copied(sample.kwargs), copied(sample.kwargs)
    expected = as_results(op.reference(**expected_args))
    actual = as_results(kernel(**given))
    if len(actual) != len(expected):
        return f"returned {len(actual)} results, expected {len(expected)}"
    bound = tolerance(dtype, op.reduction(sample.kwargs))
    dense = op.contiguous and all(
        v.is_contiguous() for v in sample.kwargs.values() if isinstance(v, Tensor)
    )
    for index, (result, wanted) in enumerate(zip(actual, expected, strict=True)):
        named = op.results[index]
        want_dtype = dtype if named == "input" else getattr(torch, named)
        problem = _form(result, wanted, want_dtype, dense) or _values(result, wanted, bound)
        if problem:
            return f"result {index}: {problem}"
    return _arguments(op, sample.kwargs, given, expected_args, bound)


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
    excess = torch.where(finite, (got - want).abs() - room, 0)
    if excess.max() <= 0:
        return None
    worst = int(excess.argmax())
    return (
        f"got {got.flatten()[worst]:.9g}, expected {want.flatten()[worst]:.9g} at flat index "
        f"{worst}; rtol {bound[0]:.3g}, {int((excess > 0).sum())} of {got.numel()} differ"
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
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
