"""Peak memory of a load, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import quantised_checkpoints as checkpoints
from gguf import GGMLQuantizationType as Kind
from gguf_writing import write_gguf
from loading_models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

#: Loads a small model first, so that the baseline holds all code and tables.
PROBE = """
import re, sys, psutil
from polysilicon.loading import load
small, large, dtype = sys.argv[1:]
load(small, dtype=dtype)
before = psutil.Process().memory_info().rss
model = load(large, dtype=dtype).model
tensors = (*model.parameters(), *model.buffers())
weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
# VmHWM, not getrusage: the latter starts at the peak of the process that forked this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print((peak - before) / weights)
"""

#: About 230 MB in float32: enough that slices and tables do not hide behind the weights.
LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 2048}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _encode(name: str, weight: Tensor) -> checkpoints.Written:
    return checkpoints.fp8_blocks(weight)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, changes in (("small", {}), ("large", LARGE)):
        model = tiny_model("llama", **changes)
        model.save_pretrained(root / name, max_shard_size="80MB")
        write_gguf(root / f"{name}.gguf", model, "llama", (Kind.Q8_0,))
        checkpoints.write(root / f"{name}.fp8", model, BLOCKS, _encode)
    return root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("suffix", ["", ".gguf", ".fp8"], ids=["folder", "gguf", "quantised"])
def test_peak_memory_stays_below_1_3_times_the_weights(
    models: Path, suffix: str, dtype: str
) -> None:
    args = [
        sys.executable,
        "-c",
        PROBE,
        f"{models}/small{suffix}",
        f"{models}/large{suffix}",
        dtype,
    ]
    out = subprocess.run(args, capture_output=True, text=True, check=True)
    assert 0.9 < float(out.stdout) < 1.3
