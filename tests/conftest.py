"""The cross-package tests: core and all plugins in one environment (`nox -s together`)."""

from __future__ import annotations

import os

# On the real device only, and only by `nox -s hardware`.
collect_ignore = [] if "POLYSILICON_HARDWARE" in os.environ else ["hardware"]
