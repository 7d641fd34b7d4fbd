"""Activation kinds against Transformers' table of activations."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2CLS, ACT2FN

from polysilicon.ops import activation

#: They own Parameters, so they are modules and not elementwise functions.
PARAMETRISED = {"prelu", "xielu"}


@pytest.mark.parametrize("kind", sorted(set(ACT2CLS) - PARAMETRISED))
def test_kind_equals_transformers_function_of_that_name(kind: str) -> None:
    x = torch.linspace(-12, 12, 1001)
    torch.testing.assert_close(
        activation.torch_kernel(x, kind), ACT2FN[kind](x), rtol=2e-6, atol=2e-6
    )


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gulu' is not known: one of .*gelu_tanh"):
        activation.canonical("gulu")
