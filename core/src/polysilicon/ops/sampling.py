"""Drawing the next token of each row of a batch, every row by its own parameters.

n rows, V tokens in the vocabulary. The order is Transformers': repetition penalty, temperature,
top-k, top-p, min-p. Each filter keeps the logits at or above a threshold, so tokens of equal logit
are kept or dropped together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator


def reference(
    logits: Tensor,  # [n, V]
    temperature: Tensor,  # [n]; 0: greedy, the filters then change nothing
    top_k: Tensor,  # int64 [n]; 0: off
    top_p: Tensor,  # [n]; 1: off
    min_p: Tensor,  # [n], relative to the likeliest token; 0: off
    penalty: Tensor,  # [n]; 1: off, above 1 makes seen tokens less likely
    seeds: Tensor,  # int64 [n]
    steps: Tensor,  # int64 [n], number of the token drawn for that seed
    seen: Tensor | None,  # int64 [n, S], prompt and output tokens, padded with -1
) -> Tensor:  # int64 [n]
    """The definition: each row's distribution in float64, inverted at that row's own number.

    Equal seeds and steps give equal tokens on every device, up to the last bits of the sums. A row
    without a distribution (NaN, or nothing but -inf) gives -1.
    """
    chances = distribution(logits, temperature, top_k, top_p, min_p, penalty, seen)
    tokens = []
    for row, seed, step in zip(chances, seeds.tolist(), steps.tolist(), strict=True):
        reached = row.cumsum(0) > _number(seed, step) * row.sum()
        tokens.append(int(reached.nonzero()[0]) if reached.any() else -1)
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def distribution(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    penalty: Tensor,
    seen: Tensor | None,
) -> Tensor:  # [n, V]
    """What each row's token is drawn from, in float64; zeros for a row that has nothing."""
    chances = logits.new_zeros(logits.shape, dtype=torch.float64)
    for row in range(logits.shape[0]):
        chances[row] = _reference_row(
            logits[row],
            float(temperature[row]),
            int(top_k[row]),
            float(top_p[row]),
            float(min_p[row]),
            float(penalty[row]),
            [] if seen is None else [token for token in seen[row].tolist() if token >= 0],
        )
    return chances


def _number(seed: int, step: int) -> float:
    """SplitMix64 of the seed, then of that plus the step's multiple of the increment; 52 bits."""

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    return (mix(mix(seed % 2**64) + step * 0x9E3779B97F4A7C15) >> 12) / 2**52


def _reference_row(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    seen: list[int],
) -> Tensor:
    scores = logits.double().clone()
    for token in set(seen):
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    if scores.isnan().any() or scores.max().isinf():
        return torch.zeros_like(scores)
    if temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), scores.shape[0]).double()
    scores /= temperature
    if top_k:
        scores[
            scores < scores.sort(descending=True).values[min(top_k, len(scores)) - 1]
        ] = -math.inf
    if top_p < 1:
        likeliest = scores.sort(descending=True).values
        before = torch.softmax(likeliest, 0).cumsum(0) - torch.softmax(likeliest, 0)
        scores[scores < likeliest[before < top_p][-1]] = -math.inf
    chances = torch.softmax(scores, 0)
    scores[chances < min_p * chances.max()] = -math.inf
    return torch.softmax(scores, 0)


def torch_kernel(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    penalty: Tensor,
    seeds: Tensor,
    steps: Tensor,
    seen: Tensor | None,
) -> Tensor:  # int64 [n]
    """Greedy rows by argmax alone; the others by inverting the cumulative distribution."""
    scores = logits if seen is None else _penalise(logits, penalty, seen)
    drawn = (temperature > 0).nonzero().view(-1)
    if len(drawn) < len(logits):
        best = scores.argmax(-1)
        top = scores.gather(-1, best[:, None])[:, 0]
        tokens = best.masked_fill(~top.isfinite(), -1)
        if not len(drawn):
            return tokens
    else:
        tokens = logits.new_empty(len(logits), dtype=torch.int64)
    parameters = (temperature, top_k, top_p, min_p)
    for filtered, rows in _groups(drawn, top_k, top_p, min_p):
        weights, candidates = _kept(filtered, _rows(scores, rows), *(p[rows] for p in parameters))
        found = _draw(weights, seeds[rows], steps[rows])
        if candidates is not None:
            named = candidates.gather(1, found.clamp(min=0)[:, None])[:, 0]
            found = torch.where(found < 0, found, named)
        tokens[rows.to(tokens.device)] = found
    return tokens


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    penalty: Tensor,
    seen: Tensor | None,
) -> Tensor:  # float64 [n, V]
    """The distributions that `torch_kernel` draws from, of rows with a temperature above 0."""
    scores = logits if seen is None else _penalise(logits, penalty, seen)
    chances = logits.new_zeros(logits.shape, dtype=torch.float64)
    everyone = torch.arange(len(logits))
    for filtered, rows in _groups(everyone, top_k, top_p, min_p):
        parameters = (p[rows] for p in (temperature, top_k, top_p, min_p))
        weights, candidates = _kept(filtered, _rows(scores, rows), *parameters)
        weights /= weights.sum(-1, keepdim=True)
        if candidates is not None:
            wide = chances.new_zeros(len(rows), logits.shape[1])
            weights = wide.scatter_(1, candidates, weights)
        chances[rows.to(chances.device)] = weights
    return chances


def _groups(
    rows: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Iterator[tuple[bool, Tensor]]:
    """The rows that have a filter, and those that have none: a filter needs the likeliest first."""
    filtered = ((top_k > 0) | (top_p < 1) | (min_p > 0))[rows]
    for kind in (True, False):
        own = rows[filtered == kind]
        if len(own):
            yield kind, own


def _rows(scores: Tensor, rows: Tensor) -> Tensor:
    return scores if len(rows) == len(scores) else scores[rows.to(scores.device)]


def _penalise(logits: Tensor, penalty: Tensor, seen: Tensor) -> Tensor:
    rows, vocabulary = logits.shape
    marked = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=logits.device)
    seen = seen.to(logits.device)
    # Padding marks one column too many, which is cut off.
    marked.scatter_(1, seen.masked_fill(seen < 0, vocabulary), True)
    scores, factor = logits.float(), penalty.to(logits.device, torch.float32)[:, None]
    changed = torch.where(scores < 0, scores * factor, scores / factor)
    return torch.where(marked[:, :vocabulary], changed, scores)


#: How many of the likeliest tokens are looked at first: nearly always more than the filters keep,
#: and far cheaper than sorting a vocabulary or than float64 over all of it.
_LIKELIEST = 512


def _kept(
    filtered: bool,
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor | None]:  # float64 [n, w], int64 [n, w]
    """Weights of what the filters keep and which tokens these are, rising; None: all in order.

    The weights are in float64, where the last bits that vector and scalar exponentials differ in
    can't move a draw: a row gives the same token whichever rows stand beside it.
    """
    scores = scores.float()
    temperature, top_p, min_p = (
        parameter.to(scores.device, torch.float64)[:, None]
        for parameter in (temperature, top_p, min_p)
    )
    if not filtered:
        # The maximum goes first: a tiny temperature then gives -inf and never inf.
        return _scaled(scores, scores.amax(-1, keepdim=True), temperature).exp_(), None
    vocabulary = scores.shape[1]
    top_k = top_k.to(scores.device)[:, None].clamp(max=vocabulary)
    mass = _mass(scores, temperature) if bool((top_p < 1).any()) else top_p
    # One more than top-k keeps, to see where its ties end.
    width = min(vocabulary, max(_LIKELIEST, int(top_k.max()) + 1))
    while True:
        values, tokens = scores.topk(width, dim=-1)
        scaled = _scaled(values, values[:, :1], temperature)
        lowest, threshold = _thresholds(scaled, mass, top_k, top_p, min_p)
        # A row is settled if what it keeps ends before the candidates do; one with NaN is lost.
        bound = torch.where(top_k > 0, lowest, threshold)
        if width == vocabulary or not bool((bound <= scaled[:, -1:]).any()):
            break
        width = min(vocabulary, width * 4)
    weights = scaled.masked_fill_(scaled < threshold, -math.inf).exp_()
    order = tokens.argsort(-1)
    return weights.gather(1, order), tokens.gather(1, order)


def _scaled(scores: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    return scores.double().sub_(top).div_(temperature)


def _mass(scores: Tensor, temperature: Tensor) -> Tensor:  # [n, 1]
    """Sum of all weights: float32 exponentials will do, it only places the edge of top-p."""
    scaled = (scores - scores.amax(-1, keepdim=True)).div_(temperature.float())
    return scaled.exp_().sum(-1, keepdim=True).double()


def _thresholds(
    scaled: Tensor,  # [n, w], falling
    mass: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:  # [n, 1] each
    """The lowest value that top-k keeps, and the lowest that all filters keep."""
    width = scaled.shape[1]
    lowest = scaled.gather(1, top_k.clamp(1, width) - 1)
    lowest = torch.where(top_k > 0, lowest, -math.inf)
    weights = scaled.masked_fill(scaled < lowest, -math.inf).exp_()
    total = torch.where(top_k > 0, weights.sum(-1, keepdim=True), mass)
    before = weights.cumsum(-1) - weights
    last = (before < top_p * total).sum(-1, keepdim=True).clamp(min=1) - 1
    nucleus = torch.where(top_p < 1, scaled.gather(1, last), -math.inf)
    return lowest, torch.maximum(torch.maximum(lowest, nucleus), min_p.log())


def _draw(weights: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:  # int64 [n]
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform(seeds, steps).to(weights.device)[:, None] * total
    # right=True passes over tokens of no weight, where the sum does not rise.
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.masked_fill(~total[:, 0].isfinite(), -1)


#: Increment and multipliers of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
#: Generators, 2014), as signed 64-bit numbers; tensor arithmetic wraps as the algorithm needs.
_GAMMA, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:  # float64 [n] in [0, 1)
    """One number a row that depends on nothing but its seed and step.

    52 bits: the largest times any total is then below that total even after rounding.
    """
    state = _mix(_mix(seeds) + steps * _GAMMA)
    return (_shift(state, 12)).double() * 2.0**-52


def _mix(state: Tensor) -> Tensor:
    state = state + _GAMMA
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Shift to the right that fills with zeros; torch's own copies the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def sampling_fake(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    penalty: Tensor,
    seeds: Tensor,
    steps: Tensor,
    seen: Tensor | None,
) -> Tensor:
    """Shape function of every kernel of this op."""
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    def make(name: str, rows: int = 3, vocabulary: int = 97, **own: Any) -> Sample:
        rng = torch.Generator().manual_seed(sum(map(ord, name)))
        # Half types give some equal logits: those must be kept or dropped together.
        logits = (torch.randn(rows, vocabulary, generator=rng) * 2).to(device, dtype)
        defaults = {
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0,
            "seeds": 7, "steps": 0,
        }  # fmt: skip
        values: dict[str, Any] = {"logits": logits, "seen": None}
        for key, default in defaults.items():
            kind = torch.int64 if isinstance(default, int) else torch.float32
            value = torch.tensor(own.pop(key, default), dtype=kind, device=device)
            values[key] = value.expand(rows).contiguous()
        values["seeds"] = values["seeds"] + torch.arange(rows, device=device)
        return Sample(name=name, kwargs=values | own)

    seen = torch.tensor([[3, 3, 5, -1], [-1, -1, -1, -1], [0, 96, 1, 2]], device=device)
    yield make("no_rows", rows=0)
    yield make("one_row", rows=1, top_k=20)
    yield make("rows_17", rows=17, top_p=0.9)
    yield make("one_token_vocabulary", vocabulary=1)
    yield make("greedy", temperature=0.0)
    yield make("plain")
    yield make("temperature", temperature=0.6)
    yield make("temperature_tiny", temperature=1e-6)
    yield make("top_k", top_k=5)
    yield make("top_k_1", top_k=1)
    yield make("top_k_wider_than_vocabulary", top_k=1000)
    yield make("top_p", top_p=0.8)
    yield make("top_p_almost_nothing", top_p=1e-4)
    yield make("top_p_past_the_sorted_part", vocabulary=5003, top_p=0.99, temperature=4.0)
    yield make("min_p", min_p=0.1)
    yield make("min_p_1", min_p=1.0)
    yield make("penalty", penalty=1.5, seen=seen)
    yield make("penalty_below_one", penalty=0.7, seen=seen)
    yield make("greedy_penalty", temperature=0.0, penalty=3.0, seen=seen)
    yield make(
        "all_filters",
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        penalty=1.2,
        seen=seen,
    )
    yield make(
        "every_row_otherwise",
        temperature=[0.0, 0.7, 1.3],
        top_k=[0, 10, 0],
        top_p=[1.0, 1.0, 0.5],
        min_p=[0.0, 0.05, 0.0],
        penalty=[2.0, 1.0, 1.1],
        seen=seen,
        steps=[0, 11, 400],
    )
    lost = make("rows_without_distribution")
    lost.kwargs["logits"][0, 5] = math.nan
    lost.kwargs["logits"][1] = -math.inf
    yield lost
    barred = make("barred_tokens", top_p=0.9)
    barred.kwargs["logits"][:, ::2] = -math.inf
    yield barred


OP = Op(
    name="sampling",
    schema=(
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
        "Tensor penalty, Tensor seeds, Tensor steps, Tensor? seen) -> Tensor"
    ),
    keys=frozenset({"vocabulary"}),
    reference=reference,
    samples=_samples,
    results=("int64",),
    source="https://arxiv.org/abs/1904.09751 (top-p); https://arxiv.org/abs/2407.01082 (min-p); "
    "https://arxiv.org/abs/1909.05858 (repetition penalty)",
)
