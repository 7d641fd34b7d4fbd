"""The conformance suite's report: `pytest --polysilicon-report FILE`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

pytest_plugins = ["polysilicon.testing.plugin"]

# Before anything imports jax: the tests interpret on the CPU, and there is no TPU to look for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`tests/aot` needs the real TPU compiler: it runs where it is asked for, and then it must."""
    asked = any("aot" in str(argument) for argument in config.args)
    return True if collection_path.name == "aot" and not asked else None
