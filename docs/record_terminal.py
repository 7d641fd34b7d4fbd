"""Runs a command in a pseudo-terminal and draws what it printed as an SVG picture.

usage: python docs/record_terminal.py OUT.svg COMMAND…   (needs rich, POSIX)
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 96


def record(command: list[str]) -> str:
    """Everything the command wrote to its terminal, escape codes included."""
    chunks: list[bytes] = []

    def read(fd: int) -> bytes:
        data = os.read(fd, 65536)
        chunks.append(data)
        return data

    os.environ.update(COLUMNS=str(WIDTH), LINES="60", TERM="xterm-256color")
    status = pty.spawn(command, read)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return b"".join(chunks).decode()


def visible(output: str) -> str:
    """The text that stays on the screen: a line that was drawn over or erased is gone."""
    lines: list[str] = []
    for line in output.replace("\r\n", "\n").split("\n"):
        # Cursor up, then erase: what a progress bar or spinner does to its own line.
        for _ in re.findall(r"\x1b\[1A\x1b\[2K", line):
            lines.pop()
        kept = re.split(r"\x1b\[2K|\r", line)[-1]
        lines.append(re.sub(r"\x1b\[(?:\?25[lh]|1A)", "", kept))
    return "\n".join(lines).strip("\n")


def main() -> None:
    """Writes the picture."""
    out, command = Path(sys.argv[1]), sys.argv[2:]
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ {shlex.join(command)}\n{visible(record(command))}"))
    svg = console.export_svg(title="polysilicon")
    # The web font it names would be fetched by whoever looks at the picture.
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL)
    out.write_text(svg.replace("Fira Code", "DejaVu Sans Mono"))


if __name__ == "__main__":
    main()
