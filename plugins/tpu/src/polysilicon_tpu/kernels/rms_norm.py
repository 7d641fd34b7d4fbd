"""rms_norm through a Pallas kernel: on a TPU by torch_tpu, on the CPU in Pallas's interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.utils.dlpack

from polysilicon.api import KernelError
from polysilicon_tpu import compiled, runtime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from polysilicon.api import Compiled, Device

NAME = "rms_norm.tpu_pallas"


def rms_norm(
    x: Tensor,  # [..., hidden]
    weight: Tensor | None,  # [hidden]
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """x / rms(x) · (weight + offset); sums in float32, rounded once to the dtype of `x`."""
    if not x.numel():
        return fake(x, weight, eps, offset)
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "tpu":
        from polysilicon_tpu.kernels.rms_norm_pallas import rms_norm as on_tpu

        op = runtime.tpu_op("polysilicon_tpu::rms_norm", on_tpu)
        result: Tensor = op(rows, weight, eps, offset)
        return result.view(x.shape)
    mode = runtime.interpreter()
    if mode is None or x.device.type != "cpu":
        raise KernelError(
            f"{NAME} got a tensor on {x.device}: it runs on a TPU, or on the CPU with "
            f"{runtime.INTERPRET}=fast"
        )
    return _interpreted(rows, weight, eps, offset, strict=mode == "strict").view(x.shape)


def _interpreted(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, *, strict: bool
) -> Tensor:
    runtime.quiet_jax()
    from jax.dlpack import from_dlpack

    from polysilicon_tpu.kernels.rms_norm_pallas import interpreted

    result = interpreted(
        from_dlpack(x.detach().contiguous()),
        None if weight is None else from_dlpack(weight.detach().contiguous()),
        eps=eps,
        offset=offset,
        strict=strict,
    )
    # jax answers before it has computed; torch takes the memory as it is.
    answer: Tensor = torch.utils.dlpack.from_dlpack(result.block_until_ready())
    return answer


def fake(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """A contiguous tensor of the shape and dtype of `x`."""
    del weight, eps, offset
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


#: Hidden sizes of SmolLM2 and of 8B and 70B models; 1023 rows leave a part of every block empty.
_VARIANTS = tuple(
    compiled.Program(
        variant=f"hidden {hidden} {dtype}",
        builder="polysilicon_tpu.kernels.rms_norm_pallas:program",
        parameters={"rows": 1023, "hidden": hidden, "dtype": dtype},
    )
    for hidden in (576, 4096, 8192)
    for dtype in ("bfloat16", "float32")
)


def offline(device: Device) -> Iterable[Compiled]:
    """The kernel through the real TPU compiler, for a TPU that need not be here.

    Raises:
        PolysiliconError: the compiler is not installed.
    """
    return compiled.compile_programs(NAME, _VARIANTS, device)
