"""torch_tpu's side of a kernel, as far as it goes without a TPU: the op is made and traced.

Needs `polysilicon-tpu[runtime]`. torch_tpu lowers the kernel for a TPU to find the shapes of the
results, so this says that its interface takes our function; nothing is executed.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polysilicon_tpu import runtime
from polysilicon_tpu.kernels.rms_norm_pallas import rms_norm

# What torch_tpu says on import and of jax_op: it is experimental, and wants another allocator.
pytestmark = pytest.mark.filterwarnings("ignore:<TorchTpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 576), (1023, 576), (1, 4096)])
@pytest.mark.parametrize("weighted", [True, False])
def test_kernel_is_an_op_that_torch_tpu_traces(
    shape: tuple[int, int], dtype: torch.dtype, weighted: bool
) -> None:
    runtime.activate()
    op = runtime.tpu_op("polysilicon_tpu::rms_norm", rms_norm)
    with FakeTensorMode():
        weight = torch.empty(shape[1], dtype=dtype) if weighted else None
        result = op(torch.empty(shape, dtype=dtype), weight, 1e-6, 0.0)
    assert (tuple(result.shape), result.dtype) == (shape, dtype)
    (made,) = torch._C._jit_get_schemas_for_operator("polysilicon_tpu::rms_norm")
    assert str(made).endswith("(Tensor x, Tensor? weight, float eps, float offset) -> Tensor")
