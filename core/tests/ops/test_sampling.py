from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from polysilicon.ops import sampling

if TYPE_CHECKING:
    from torch import Tensor

    from polysilicon.ops.contract import Sample

CASES = [
    pytest.param(sample, id=f"{str(dtype)[6:]}-{sample.name}")
    for dtype in sampling.OP.dtypes
    for sample in sampling.OP.samples(dtype, torch.device("cpu"))
]


def _rows(count: int, **parameters: float) -> dict[str, Tensor]:
    """Parameters of `count` rows, alike but for their seeds."""
    floats = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    values = {key: torch.full((count,), parameters.get(key, own)) for key, own in floats.items()}
    values["top_k"] = torch.full((count,), int(parameters.get("top_k", 0)))
    values["seeds"] = torch.arange(count) * 1000 + 17
    values["steps"] = torch.zeros(count, dtype=torch.int64)
    return values


def _pick(kwargs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return {key: None if value is None else value[rows] for key, value in kwargs.items()}


@pytest.mark.parametrize("sample", CASES)
def test_probabilities_agree_with_the_reference(sample: Sample) -> None:
    kwargs = dict(sample.kwargs)
    chosen = _pick(kwargs, (kwargs["temperature"] > 0).nonzero().view(-1).tolist())
    del chosen["seeds"], chosen["steps"]
    expected = sampling.distribution(**chosen)
    actual = sampling.probabilities(**chosen).nan_to_num(0.0)
    # The penalty is applied in float32.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("sample", CASES)
def test_tokens_are_the_references(sample: Sample) -> None:
    expected = sampling.reference(**sample.kwargs)
    tokens = sampling.torch_kernel(**sample.kwargs)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == expected.tolist()


def test_rows_without_a_distribution_give_minus_one() -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 8] = torch.inf
    for temperature in (0.0, 1.0):
        rows = _rows(4, temperature=temperature)
        assert sampling.torch_kernel(logits, **rows, seen=None).tolist()[:3] == [-1, -1, -1]


@pytest.mark.parametrize("sample", CASES)
def test_a_row_alone_gives_the_token_it_gives_in_a_batch(sample: Sample) -> None:
    together = sampling.torch_kernel(**sample.kwargs).tolist()
    alone = [
        int(sampling.torch_kernel(**_pick(dict(sample.kwargs), [row])))
        for row in range(len(together))
    ]
    assert alone == together


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0]])
    assert sampling.torch_kernel(logits, **_rows(1, temperature=0.0), seen=None).tolist() == [1]


def test_rows_do_not_depend_on_each_other_over_a_real_vocabulary() -> None:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 49157, generator=rng) * 3
    rows = _rows(24, top_p=0.95)
    order = torch.randperm(24, generator=rng).tolist()
    shuffled = {key: value[order] for key, value in rows.items()}
    together = sampling.torch_kernel(logits, **rows, seen=None)
    again = sampling.torch_kernel(logits[order], **shuffled, seen=None)
    assert again.tolist() == together[order].tolist()
    one = {key: value[5:6] for key, value in rows.items()}
    assert int(sampling.torch_kernel(logits[5:6], **one, seen=None)) == together[5]


@pytest.mark.parametrize("varied", ["seeds", "steps"])
def test_drawn_tokens_follow_the_distribution(varied: str) -> None:
    draws = 20_000
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, -3.0, 1.5, -0.5]).expand(draws, -1)
    rows = _rows(draws, temperature=0.9, min_p=0.02)
    rows["seeds"] = torch.full((draws,), 42)
    rows[varied] = torch.arange(draws)
    one = {key: value[:1] for key, value in rows.items() if key not in ("seeds", "steps")}
    expected = sampling.distribution(logits[:1], **one, seen=None)[0] * draws
    tokens = sampling.torch_kernel(logits, **rows, seen=None)
    counts = torch.bincount(tokens, minlength=7).double()
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # 5 degrees of freedom (one token is cut by min-p): beyond 20.5 lies one chance in a thousand.
    assert int(possible.sum()) == 6
    assert statistic < 20.5


def test_uniform_numbers_fill_the_interval_for_neighbouring_seeds_and_steps() -> None:
    seeds = torch.arange(200).repeat_interleave(200)
    steps = torch.arange(200).repeat(200)
    numbers = sampling.uniform(seeds, steps)
    assert len(set(numbers.tolist())) == numbers.numel()
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    # 99 degrees of freedom: beyond 148 lies one chance in a thousand.
    assert ((counts - 400) ** 2 / 400).sum() < 148
    correlation = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
    assert abs(correlation) < 4 / numbers.numel() ** 0.5


def test_negative_seeds_are_as_good_as_any() -> None:
    seeds = torch.tensor([-1, -(2**63), 2**63 - 1, 0])
    numbers = sampling.uniform(seeds, torch.zeros(4, dtype=torch.int64))
    assert len(set(numbers.tolist())) == 4
    assert 0 <= numbers.min() < numbers.max() < 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.7},
        {"top_k": 13},
        {"top_p": 0.6},
        {"min_p": 0.07},
        {"penalty": 1.3},
        {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "penalty": 1.1},
        {"temperature": 0.3, "top_p": 0.2, "min_p": 0.5, "penalty": 0.8},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_distribution_is_that_of_transformers(parameters: dict[str, float]) -> None:
    rng = torch.Generator().manual_seed(11)
    logits = torch.randn(4, 311, generator=rng) * 2.5
    seen = torch.randint(0, 311, (4, 29), generator=rng)
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(parameters.get("penalty", 1.0)),
            TemperatureLogitsWarper(parameters.get("temperature", 1.0)),
            TopKLogitsWarper(int(parameters.get("top_k", 311))),
            TopPLogitsWarper(parameters.get("top_p", 1.0)),
            MinPLogitsWarper(parameters.get("min_p", 0.0)),
        ]
    )
    expected = torch.softmax(chain(seen, logits.clone()), -1)
    rows = _rows(4, **parameters)
    del rows["seeds"], rows["steps"]
    actual = sampling.probabilities(logits, **rows, seen=seen)
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual.float(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tied", [1, 600, 5000])
def test_equal_logits_at_the_edge_of_top_k_are_all_kept(tied: int) -> None:
    # More ties than the first candidates hold: the search has to widen.
    logits = torch.zeros(1, 9001)
    logits[0, 100 : 100 + tied] = 1.0
    logits[0, 7] = 2.0
    rows = _rows(1, top_k=2)
    del rows["seeds"], rows["steps"]
    kept = (sampling.probabilities(logits, **rows, seen=None)[0] > 0).nonzero().view(-1)
    assert kept.tolist() == [7, *range(100, 100 + tied)]


def test_flat_distribution_over_a_large_vocabulary_keeps_its_share() -> None:
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 20_011, generator=rng) * 0.1
    rows = _rows(2, top_p=0.5)
    tokens = sampling.torch_kernel(logits, **rows, seen=None)
    assert tokens.tolist() == sampling.reference(logits, **rows, seen=None).tolist()
    del rows["seeds"], rows["steps"]
    kept = sampling.probabilities(logits, **rows, seen=None) > 0
    assert torch.equal(kept, sampling.distribution(logits, **rows, seen=None) > 0)
