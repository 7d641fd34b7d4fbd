"""Proof by running: the original and its replacement on the same inputs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polysilicon.ops.contract import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

#: Sizes of probe inputs: norms and activations behave differently at the ends of this range.
MAGNITUDES = (1e-4, 1e-2, 1.0, 1e2)

#: Ratio of the largest errors of a few probes that chance explains.
_CHANCE = 4

#: Rows of each magnitude in the probe of many tokens.
_ROWS = 2


class Unverified(Exception):
    """The replacement did not reproduce the original, or could not be tried; the text says why."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of one probe call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Inputs:
    """The arguments of one probe call."""
    return Inputs(args, kwargs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leaves random state as it was and computes no gradients."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    found = {p.device.index or 0 for p in model.parameters() if p.device.type == kind != "cpu"}
    with torch.random.fork_rng(devices=sorted(found), device_type=kind), torch.no_grad():
        yield


def generator(seed: int = 0) -> torch.Generator:
    """Our own random state: probes must not draw from the user's."""
    return torch.Generator().manual_seed(seed)


def tensors(width: int, like: Tensor) -> Iterator[Tensor]:
    """Probe inputs [..., width], not centred on zero: one token, then rows of every magnitude.

    One token takes other kernels than many. Magnitudes share a call, as errors are measured row by
    row; a weight is read twice only.
    """
    source = generator()
    sizes = torch.tensor(MAGNITUDES).view(-1, 1, 1)
    many = (torch.randn(len(MAGNITUDES), _ROWS, width, generator=source) + 0.3) * sizes
    for x in (many[-2:-1, :1], many):
        yield x.to(like.device, like.dtype)


def relative_error(theirs: Any, ours: Any) -> float:
    """Largest difference of two results, relative to the largest entry of the same row of theirs.

    Raises:
        Unverified: they differ in structure, shape or dtype, or in where they are finite.
    """
    if isinstance(theirs, (tuple, list)):
        if not isinstance(ours, (tuple, list)) or len(theirs) != len(ours):
            raise Unverified("the results differ in structure")
        return max((relative_error(a, b) for a, b in zip(theirs, ours, strict=True)), default=0.0)
    if theirs is None and ours is None:
        return 0.0
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        raise Unverified("the results differ in structure")
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        raise Unverified(
            f"result {tuple(ours.shape)} {ours.dtype} instead of "
            f"{tuple(theirs.shape)} {theirs.dtype}"
        )
    return _largest_difference(theirs, ours)


def _largest_difference(theirs: Tensor, ours: Tensor) -> float:
    if theirs.is_complex():
        theirs, ours = torch.view_as_real(theirs), torch.view_as_real(ours)
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(ours)):
        raise Unverified("the results overflow in different places")
    if not finite.any():
        return 0.0
    theirs, ours = (x.masked_fill(~finite, 0).double() for x in (theirs, ours))
    largest = theirs.abs().amax(-1)
    difference = (theirs - ours).abs().amax(-1)
    # A row of zeros must be zeros.
    return float((difference / largest.masked_fill(largest == 0, 1.0)).max())


def verify(
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    probes: Iterable[Inputs],
    *,
    dtype: torch.dtype,
    reduction: int = 1,
) -> float:
    """Largest relative error over all probes.

    Raises:
        Unverified: it is beyond the tolerance of the dtype and reduction length, or one raised.
    """
    asked = list(probes)
    theirs = (_run("original", original, probe) for probe in asked)
    return verify_answers(theirs, replacement, asked, dtype=dtype, reduction=reduction)


def answers(original: Callable[..., Any], probes: Iterable[Inputs]) -> list[Any]:
    """The original's results, for `verify_answers` of many replacements.

    Raises:
        Unverified: it raised.
    """
    return [_run("original", original, probe) for probe in probes]


def verify_answers(
    theirs: Iterable[Any],
    replacement: Callable[..., Any],
    probes: Iterable[Inputs],
    *,
    dtype: torch.dtype,
    reduction: int = 1,
) -> float:
    """`verify`, against results that the original gave before.

    Raises:
        Unverified: as `verify`.
    """
    bound = tolerance(dtype, reduction)[0]
    worst = 0.0
    for expected, probe in zip(theirs, probes, strict=True):
        error = relative_error(expected, _run("replacement", replacement, probe))
        if not error <= bound:
            raise Unverified(f"results differ by {error:.1e} of the largest, allowed {bound:.1e}")
        worst = max(worst, error)
    return worst


def verify_rounding(
    truth: Callable[..., list[Tensor]],
    original: Callable[..., list[Tensor]],
    replacement: Callable[..., list[Tensor]],
    probes: Iterable[tuple[Inputs, Inputs]],
    *,
    dtype: torch.dtype,
    reduction: int,
) -> float:
    """Error in a short dtype against `truth` in float32, held against the original's own.

    Roundings follow one another in attention, and the softmax of large scores enlarges them: no
    bound that fits every weight would be sharp. What is computed must be proved in float32 before.

    Args:
        truth: the original in float32.
        original: the same in the short dtype.
        replacement: ours in the short dtype.
        probes: the same inputs in the short dtype and in float32.
        dtype: the short dtype.
        reduction: length of the longest sum.

    Raises:
        Unverified: the replacement's error is beyond chance larger than the original's.
    """
    worst, least = 0.0, tolerance(dtype, reduction)[0]
    for probe, wide in probes:
        exact = _run("original", truth, wide)
        theirs = _run("original", original, probe)
        ours = _run("replacement", replacement, probe)
        allowed = max(least, _CHANCE * relative_error(exact, [x.float() for x in theirs]))
        error = relative_error(exact, [x.float() for x in ours])
        if not error <= allowed:
            raise Unverified(f"results differ by {error:.1e} of the largest, allowed {allowed:.1e}")
        worst = max(worst, error)
    return worst


def as_floats(probe: Inputs) -> Inputs:
    """The same arguments in float32; ids and masks of truth values stay."""

    def widen(x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x

    args, kwargs = tree_map_only(torch.Tensor, widen, (probe.args, probe.kwargs))
    return Inputs(args, kwargs)


def _run(who: str, function: Callable[..., Any], probe: Inputs) -> Any:
    # Copies, because an activation may work in place.
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (probe.args, probe.kwargs))
    try:
        return function(*args, **kwargs)
    # Foreign code on made-up inputs: whatever it raises means "not what we took it for".
    except Exception as error:
        raise Unverified(f"the {who} raised {type(error).__name__}: {error}") from error


def first_verified(
    attempts: Iterable[Callable[[], tuple[Any, float]]], nothing: str
) -> tuple[Any, float]:
    """The result of the first attempt that verifies.

    Raises:
        Unverified: none does; the text is the closest attempt's, or `nothing` without attempts.
    """
    reasons: list[str] = []
    for attempt in attempts:
        try:
            return attempt()
        except Unverified as reason:
            reasons.append(str(reason))
    raise Unverified(reasons[0] if reasons else nothing)
