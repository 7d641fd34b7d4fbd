"""What the README shows works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
LINKS = sorted(set(re.findall(r"\]\(([^)#]+)\)", README)))
COMMANDS = sorted(set(re.findall(r"^polysilicon ([\w-]+(?: \w+)?)", README, flags=re.MULTILINE)))


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", LINKS)
def test_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    words = command.split()
    if words[0] != "bench":
        words = words[:1]
    done = subprocess.run(
        [sys.executable, "-m", "polysilicon", *words, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_set_up_commands_name_sessions_of_the_noxfile() -> None:
    sessions = re.findall(r"python3 -m nox -s (\w+)", README)
    assert sessions == ["demo"]
    assert f"def {sessions[0]}(" in (ROOT / "noxfile.py").read_text()
