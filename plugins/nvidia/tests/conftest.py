"""Without a GPU, Triton's interpreter runs the kernels; with one, the GPU does."""

import os

import pytest

from polysilicon.testing import triton_interpreter
from polysilicon_nvidia.device import detect

pytest_plugins = ["polysilicon.testing.plugin"]

# Before anything imports Triton. Set beforehand, the variable interprets beside a GPU, too.
if "TRITON_INTERPRET" in os.environ or not detect():
    triton_interpreter.activate()


@pytest.fixture
def torch_device() -> str:
    """Where the kernels run."""
    return "cpu" if "TRITON_INTERPRET" in os.environ else "cuda"
