"""The conformance suite's report: `pytest --polysilicon-report FILE`."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

pytest_plugins = ["polysilicon.testing.plugin"]

# Before anything imports jax: the tests interpret on the CPU, and there is no TPU to look for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Importing torch loads no backend by itself: the device's activation does, where it is tested.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders that need what is not in the extra `test` run where they are asked for, and fail
    there without it: `aot` the real TPU compiler, `runtime` torch_tpu."""
    asked = {part for argument in config.args for part in PurePath(argument).parts}
    by_name = {"aot", "runtime"} - asked
    return True if collection_path.name in by_name and collection_path.is_dir() else None
