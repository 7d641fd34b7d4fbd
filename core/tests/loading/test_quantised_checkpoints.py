"""Quantised checkpoints: each format's layout loads, keeps its bytes, and gives its own numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import quantised_checkpoints as checkpoints
import torch
from loading_models import logits, tiny_model
from test_load_folder import edit_config

import polysilicon
from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import LoadError
from polysilicon.layers import QuantizedLinear
from polysilicon.loading import load
from polysilicon.ops.verify import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {"hidden_size": 128, "intermediate_size": 256}
#: Neither dim of the blocks of 128 divides it.
UNEVEN = {"hidden_size": 128, "intermediate_size": 160}


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint: its config, its writer, and what its layers are in our words."""

    config: dict[str, Any]
    encode: Callable[[torch.Tensor], checkpoints.Written]
    format: str
    inputs: str = ""
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)


def _gptq(format: str, **options: Any) -> Case:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return Case({**config, **options}, partial(checkpoints.gptq, **options), format)


CASES = {
    "gptq": _gptq("int4.gptq/group:32/float16/zeros"),
    "gptq group 64": _gptq("int4.gptq/group:64/float16/zeros", group_size=64, sym=False),
    "gptq group 128": _gptq("int4.gptq/group:128/float16/zeros", group_size=128),
    "gptq no groups": _gptq("int4.gptq/channel/float16/zeros", group_size=-1, sym=False),
    "gptq act-order": _gptq("int4.gptq/group:32/float16/zeros", desc_act=True, sym=False),
    "gptq 8 bits": _gptq("int8.gptq/group:32/float16/zeros", bits=8),
    "gptq_v2": _gptq("int4.gptq_v2/group:32/float16/zeros", checkpoint_format="gptq_v2", sym=False),
    "fp8 blocks": Case(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        checkpoints.fp8_blocks,
        "fp8_e4m3fn/block:128x128/float32",
        "group",
        UNEVEN,
    ),
    "fp8 tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        checkpoints.fp8_tensor,
        "fp8_e4m3fn/tensor/float32",
        "token",
    ),
    "fp8 tensor, static": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        partial(checkpoints.fp8_tensor, name="weight_scale_inv", static="activation_scale"),
        "fp8_e4m3fn/tensor/float32",
        "static",
    ),
    "fp8 channel": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        checkpoints.fp8_channel,
        "fp8_e4m3fn/channel/float32",
        "token",
    ),
}


def _written(folder: Path, case: Case, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = tiny_model("llama", **case.sizes, **changes)
    state = checkpoints.write(folder, model, case.config, case.encode, inputs=case.inputs)
    return model, state


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_gives_the_dequantised_models_logits_and_its_own_bytes(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    reference, state = _written(tmp_path, case)
    model: Any = load(tmp_path).model
    ours = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert {str(layer.format) for layer in ours} == {case.format}
    assert len(ours) == 2 * 7
    wanted = logits(reference)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    kept = model.state_dict()
    assert kept.keys() == state.keys()
    assert all(same_bits(kept[key], tensor) for key, tensor in state.items())
