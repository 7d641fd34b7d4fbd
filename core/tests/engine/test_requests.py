"""What is refused about a request, each with one clear error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from polysilicon.engine.request import SamplingParams, check_prompt
from polysilicon.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", math.nan, "temperature is nan: expected a finite number >= 0; 0 is greedy"),
        ("temperature", -1.0, "temperature is -1.0: expected a finite number >= 0"),
        ("temperature", math.inf, "temperature is inf"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("top_p", 0, "top_p is 0: expected a finite number > 0 and <= 1; 1 turns it off"),
        ("top_p", 1.1, "top_p is 1.1"),
        ("top_p", math.nan, "top_p is nan"),
        ("min_p", -0.1, "min_p is -0.1: expected a finite number >= 0 and <= 1"),
        ("top_k", -1, "top_k is -1: expected a whole number from 0 to 2^63 - 1; 0 turns it off"),
        ("top_k", 2.5, "top_k is 2.5"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0: expected a finite number > 0"),
        (
            "max_new_tokens",
            0,
            "max_new_tokens is 0: expected a whole number from 1 to 2^63 - 1; ask for",
        ),
        ("max_new_tokens", True, "max_new_tokens is True"),
        ("seed", -3, "seed is -3"),
        ("seed", 2**63, "seed is 9223372036854775808"),
        ("stop", "end", "stop is 'end': expected a tuple of texts"),
        ("stop", ("",), "none of them empty"),
        ("stop_ids", (-1,), "stop_ids is -1"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "the prompt is empty"),
        ([1, 50], "token 50 at position 1 of the prompt is not an id of this model"),
        ([-1], "token -1 at position 0"),
        ([1.5], "token 1.5"),
        ([1] * 20, "the prompt has 20 tokens and the context holds 20"),
    ],
)
def test_a_wrong_prompt_is_refused(prompt: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt(prompt, vocabulary=50, context=20)
    assert said in str(caught.value)


def test_prompts_may_be_arrays_and_tensors() -> None:
    for prompt in (np.array([3, 4]), torch.tensor([3, 4]), (3, 4)):
        ids = check_prompt(prompt, vocabulary=50, context=20)
        assert (ids, {type(token) for token in ids}) == ([3, 4], {int})


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert len(check_prompt([1] * 19, vocabulary=50, context=20)) == 19
