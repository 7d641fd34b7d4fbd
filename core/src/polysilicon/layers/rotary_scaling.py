"""Frequencies of rotary embedding for every scaling rule that model configs name.

`frequencies(parameters, …)` reads the keys of a config's `rope_parameters` (`rope_type`,
`rope_theta`, `factor` …) and needs no model class. Sources: position interpolation
(arXiv:2306.15595), dynamic NTK and YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), Llama
3.1's band-wise rule, Gemma's proportional rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, kw_only=True)
class DynamicNTK:
    """Beyond `max_positions`, the base grows with the length of the sequence."""

    base: float
    rotary: int
    factor: float
    max_positions: int

    def inv_freq(self, length: Tensor) -> Tensor:
        """Frequencies for sequences of `length` tokens (an integer tensor of no dims)."""
        reach = length.clamp(min=self.max_positions).float() / self.max_positions
        stretch = self.factor * reach - (self.factor - 1)
        base = self.base * stretch ** (self.rotary / (self.rotary - 2))
        steps = torch.arange(0, self.rotary, 2, device=length.device).float() / self.rotary
        return 1.0 / base**steps


@dataclass(frozen=True, kw_only=True)
class RotaryFrequencies:
    """What a scaling rule yields.

    Attributes:
        inv_freq: float32 [rotary / 2], for sequences of ordinary length.
        scaling: factor of cos and sin.
        dynamic: set when the frequencies follow the sequence length continuously.
        long_inv_freq: float32 [rotary / 2], used for sequences longer than `long_after` tokens.
        long_after: see `long_inv_freq`.
    """

    inv_freq: Tensor
    scaling: float = 1.0
    dynamic: DynamicNTK | None = None
    long_inv_freq: Tensor | None = None
    long_after: int = 0


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments that every rule takes, read once."""

    parameters: Mapping[str, Any]
    head_size: int
    max_positions: int

    def need(self, key: str) -> Any:
        if self.parameters.get(key) is None:
            raise ValueError(
                f"rotary scaling {self.parameters.get('rope_type')!r} needs {key!r}, got keys "
                f"{sorted(self.parameters)}: add it to the config's rope_parameters"
            )
        return self.parameters[key]

    @property
    def base(self) -> float:
        return float(self.need("rope_theta"))

    @property
    def rotary(self) -> int:
        return int(self.head_size * self.parameters.get("partial_rotary_factor", 1.0))

    @property
    def stretch(self) -> float:
        """`factor`; where absent, the ratio of the new to the original context."""
        factor = self.parameters.get("factor")
        if factor is None:
            return self.max_positions / float(self.need("original_max_position_embeddings"))
        return float(factor)

    def wavelength_over_2pi(self) -> Tensor:
        """base^(2i / rotary) for every pair i."""
        return self.base ** (torch.arange(0, self.rotary, 2).float() / self.rotary)


def frequencies(
    parameters: Mapping[str, Any], *, head_size: int, max_positions: int
) -> RotaryFrequencies:
    """The frequencies that `parameters` describe.

    Args:
        parameters: a config's `rope_parameters`; without `rope_type` it is `default`.
        head_size: size of a head; `partial_rotary_factor` says how much of it is turned.
        max_positions: the config's context length.

    Raises:
        ValueError: an unknown `rope_type`, or a key that the rule needs is missing.
    """
    kind = parameters.get("rope_type") or "default"
    if kind not in RULES:
        raise ValueError(f"rotary scaling {kind!r} is not known: one of {', '.join(sorted(RULES))}")
    request = _Request(parameters=parameters, head_size=head_size, max_positions=max_positions)
    return RULES[kind](request)


def _default(request: _Request) -> RotaryFrequencies:
    return RotaryFrequencies(inv_freq=1.0 / request.wavelength_over_2pi())


def _linear(request: _Request) -> RotaryFrequencies:
    factor = float(request.need("factor"))
    return RotaryFrequencies(inv_freq=1.0 / request.wavelength_over_2pi() / factor)


def _dynamic(request: _Request) -> RotaryFrequencies:
    rule = DynamicNTK(
        base=request.base,
        rotary=request.rotary,
        factor=float(request.need("factor")),
        max_positions=request.max_positions,
    )
    return RotaryFrequencies(inv_freq=1.0 / request.wavelength_over_2pi(), dynamic=rule)


def _llama3(request: _Request) -> RotaryFrequencies:
    """Long waves slow down by `factor`, short ones stay, those between are blended."""
    inv_freq = 1.0 / request.wavelength_over_2pi()
    factor = float(request.need("factor"))
    low, high = float(request.need("low_freq_factor")), float(request.need("high_freq_factor"))
    turns = float(request.need("original_max_position_embeddings")) * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return RotaryFrequencies(inv_freq=inv_freq * (kept + (1 - kept) / factor))


def _yarn(request: _Request) -> RotaryFrequencies:
    """Frequencies between two numbers of turns are blended by a ramp over their index."""
    wavelength = request.wavelength_over_2pi()
    factor = request.stretch
    low, high = _yarn_ramp(request)
    index = torch.arange(request.rotary // 2).float()
    slowed = ((index - low) / (high - low)).clamp(0.0, 1.0)
    inv_freq = slowed / (factor * wavelength) + (1 - slowed) / wavelength
    return RotaryFrequencies(inv_freq=inv_freq, scaling=_yarn_scaling(request, factor))


def _yarn_ramp(request: _Request) -> tuple[float, float]:
    context = float(request.need("original_max_position_embeddings"))

    def index_of(turns: float) -> float:
        """Index of the frequency that makes `turns` turns over the original context."""
        waves = math.log(context / (turns * 2 * math.pi))
        return request.rotary * waves / (2 * math.log(request.base))

    low = index_of(request.parameters.get("beta_fast") or 32)
    high = index_of(request.parameters.get("beta_slow") or 1)
    if request.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, request.rotary - 1)
    # A ramp of no width would divide by zero.
    return (low, high) if low != high else (low, high + 0.001)


def _yarn_scaling(request: _Request, factor: float) -> float:
    given = request.parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    part, whole = request.parameters.get("mscale"), request.parameters.get("mscale_all_dim")
    if part and whole:
        return temperature(part) / temperature(whole)
    return temperature(1.0)


def _longrope(request: _Request) -> RotaryFrequencies:
    """One factor for every frequency, from one list for short and one for long sequences."""
    wavelength = request.wavelength_over_2pi()
    context = int(request.need("original_max_position_embeddings"))
    short = torch.tensor(request.need("short_factor"), dtype=torch.float32)
    long = torch.tensor(request.need("long_factor"), dtype=torch.float32)
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if factors.shape != wavelength.shape:
            raise ValueError(
                f"rotary scaling 'longrope': {name} has {factors.numel()} numbers, expected "
                f"{wavelength.numel()}, one a frequency"
            )
    return RotaryFrequencies(
        inv_freq=1.0 / (short * wavelength),
        scaling=_longrope_scaling(request, context),
        long_inv_freq=1.0 / (long * wavelength),
        long_after=context,
    )


def _longrope_scaling(request: _Request, context: int) -> float:
    given = request.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = request.stretch
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(context))


def _proportional(request: _Request) -> RotaryFrequencies:
    """All pairs of the head are listed; those past the rotary share stand still."""
    pairs = request.head_size // 2
    turning = int(request.parameters.get("partial_rotary_factor", 1.0) * request.head_size // 2)
    inv_freq = torch.zeros(pairs)
    steps = torch.arange(0, 2 * turning, 2).float() / request.head_size
    inv_freq[:turning] = 1.0 / request.base**steps
    return RotaryFrequencies(inv_freq=inv_freq / float(request.parameters.get("factor", 1.0)))


#: rope_type → rule.
RULES: dict[str, Callable[[_Request], RotaryFrequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
