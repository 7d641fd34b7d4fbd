"""Run by `nox -s hardware`, on a machine that has the device."""

from __future__ import annotations

pytest_plugins = ["polysilicon.testing.plugin"]
