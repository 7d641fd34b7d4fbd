"""No token is dropped, no index is silently wrong, and the router's choice is a choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.layers import Experts, Router
from polysilicon.ops import experts, moe_router


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    number=st.integers(1, 9),
    top_k=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_every_choice_is_computed_once(tokens: int, number: int, top_k: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    indices = torch.randint(number, (tokens, top_k), generator=source)
    x = torch.ones(tokens, 1)
    # Expert e gives e + 1 whatever comes in, so that the sum shows which of them ran.
    up, down = torch.zeros(number, 1, 1), torch.zeros(number, 1, 1)
    bias = torch.arange(1.0, number + 1)[:, None]
    weights = torch.rand(tokens, top_k, generator=source)
    got = experts.torch_kernel(
        x, indices, weights, up, None, down, bias, "identity", False, False, 0.0, 0.0
    )
    wanted = ((indices + 1) * weights).sum(-1, keepdim=True)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_expert_that_does_not_exist_is_named(wrong: int) -> None:
    layer = Experts(torch.randn(5, 8, 4), torch.randn(5, 4, 4))
    indices = torch.tensor([[0, wrong]])
    with pytest.raises(ValueError, match=rf"expert {wrong} was chosen .* there are 5"):
        layer(torch.randn(1, 4), indices, torch.ones(1, 2))


def test_groups_close_the_experts_outside_of_them() -> None:
    logits = torch.tensor([[9.0, 1.0, 8.0, 7.5]])
    # The first group holds the best expert, the second the better two.
    _, by_best = moe_router.torch_kernel(logits, None, 2, "sigmoid", 2, 1, 1, False, 1.0)
    _, by_two = moe_router.torch_kernel(logits, None, 2, "sigmoid", 2, 1, 2, False, 1.0)
    assert (sorted(by_best[0].tolist()), sorted(by_two[0].tolist())) == ([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"top_k": 9}, "top_k is 9, a token may choose from 8"),
        ({"top_k": 2, "groups": 3}, "8 experts in 3 groups"),
        ({"top_k": 2, "scoring": "hardmax"}, "scoring is 'hardmax', expected one of"),
    ],
)
def test_a_router_that_cannot_be_is_refused(settings_: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Router(torch.randn(8, 4), **settings_)  # type: ignore[arg-type]


def test_experts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"up is \(5, 8, 4\) and down \(5, 4, 8\)"):
        Experts(torch.randn(5, 8, 4), torch.randn(5, 4, 8))
