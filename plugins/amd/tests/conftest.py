"""Triton's interpreter for this process, and the conformance suite's report."""

from __future__ import annotations

from polysilicon.testing import triton_interpreter

triton_interpreter.activate()

pytest_plugins = ["polysilicon.testing.plugin"]
