"""docs/write-a-plugin.md works as it is written: every block, in order, with what it shows."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import pytest
from installing import run, uv
from scripts import ROOT
from tutorial import Tutorial, commands

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "write-a-plugin.md"
#: What a reader's environment has on its PATH, of the environment that runs the tests.
_SCRIPT = """#!{python}
import sys
from {module} import main
sys.argv[0] = {name!r}
sys.exit(main())
"""
_PIP = """#!/bin/sh
shift
exec {uv} pip install --quiet --no-deps --python {python} "$@"
"""


@pytest.fixture
def readers_environment(tmp_path: Path) -> dict[str, str]:
    """A fresh environment that sees what this one has installed: torch, core, pytest."""
    home = tmp_path / "environment"
    run(uv(), "venv", "--quiet", "--python", sys.executable, home)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/*/site-packages")
    (packages / "base.pth").write_text("\n".join(filter(None, sys.path)))
    scripts = {
        "polysilicon": _SCRIPT.format(python=python, module="polysilicon.cli", name="polysilicon"),
        "pytest": _SCRIPT.format(python=python, module="pytest", name="pytest"),
        # The packages that pip would look for are there already.
        "pip": _PIP.format(uv=uv(), python=python),
    }
    for name, text in scripts.items():
        (home / "bin" / name).write_text(text)
        (home / "bin" / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("POLYSILICON", "PYTHON"))}
    path = os.pathsep.join((str(home / "bin"), kept["PATH"]))
    cache = str(tmp_path / "cache")
    return kept | {"PATH": path, "COLUMNS": "100", "POLYSILICON_CACHE_DIR": cache}


def test_the_tutorial_works_as_it_is_written(
    tmp_path: Path, readers_environment: dict[str, str]
) -> None:
    Tutorial(PAGE, tmp_path, readers_environment).run()


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert links
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []


def test_console_block_is_commands_with_their_outputs() -> None:
    assert [*commands("$ a\n1\n2\n$ b\n")] == [("a", "1\n2"), ("b", "")]
