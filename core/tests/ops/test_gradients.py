"""The portable kernels can be differentiated: an adapted model may be fine-tuned."""

from __future__ import annotations

import pytest
import torch

from polysilicon import ops
from polysilicon.calling import load_kernel
from polysilicon.defaults import KERNELS
from polysilicon.ops.verify import as_results

OPS = {
    "rms_norm": "offset 1",
    "add_rms_norm": "tokens 7",
    "rms_norm_gated": "tokens 7 group 32 before True",
    "layer_norm": "tokens 7",
    "rotary_embedding": "tokens 7 head 16 of 8",
    "silu_and_mul": "tokens 7",
    "gelu_and_mul": "tanh tokens 7",
    "linear": "tokens 7",
}


def gradients(call: object, kwargs: dict[str, object]) -> list[torch.Tensor]:
    given = {
        k: v.clone().requires_grad_() if isinstance(v, torch.Tensor) else v
        for k, v in kwargs.items()
    }
    sum(y.double().square().sum() for y in as_results(call(**given))).backward()
    return [v.grad for v in given.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.op in OPS], ids=lambda k: k.name)
def test_gradient_agrees_with_the_reference(kernel: object) -> None:
    op = ops.get(kernel.op)
    samples = op.samples(torch.float32, torch.device("cpu"))
    kwargs = dict(next(s for s in samples if s.name == OPS[kernel.op]).kwargs)
    expected = gradients(op.reference, kwargs)
    for ours, wanted in zip(gradients(load_kernel(kernel), kwargs), expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
