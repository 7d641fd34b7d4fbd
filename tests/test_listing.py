"""All plugins in one environment: each is active, and listing them imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PLUGINS = sorted(path.parent.name for path in Path(__file__).parents[1].glob("plugins/*/src"))
#: `polysilicon plugins --json` in this process, then what it has imported.
LISTING = """
import json, sys
from polysilicon.cli import build
sys.argv = ["polysilicon", "plugins", "--json"]
try:
    build("plugins")()
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""


def _listing() -> tuple[dict[str, str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", LISTING], capture_output=True, text=True, check=True
    )
    listed, modules = done.stdout.splitlines()
    states = {row["name"]: row["state"] for row in json.loads(listed)["plugins"]}
    return states, json.loads(modules)


def test_all_plugins_are_active_and_nothing_heavy_is_imported() -> None:
    states, modules = _listing()
    assert states == dict.fromkeys([*PLUGINS, "core"], "active")
    heavy = ("torch", "numpy", "triton", "jax", "transformers")
    assert [name for name in heavy if name in modules] == []


def test_no_chip_of_the_plugins_is_here_and_none_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polysilicon", "devices", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"][-1]["name"] == "cpu"
