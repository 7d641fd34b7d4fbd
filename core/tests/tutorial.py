"""Runs a tutorial: writes its files, applies its changes, executes its commands, compares outputs.

Blocks, in order: `python` whose first line is a comment with a path is that file; `diff` whose
first line names a file changes it; `console` holds commands after `$ ` and what each prints, where
`…` stands for anything.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass
class Tutorial:
    """A page on its way: `folder` is where the reader is."""

    page: Path
    folder: Path
    environment: Mapping[str, str]
    files: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Does everything that the page says; an AssertionError shows what was otherwise."""
        for kind, text in _BLOCK.findall(self.page.read_text()):
            if kind == "python":
                self._write(text)
            elif kind == "diff":
                self._change(text)
            else:
                assert kind == "console", f"a block of kind {kind}:\n{text}"
                for command, expected in commands(text):
                    self._execute(command, expected)

    def _write(self, text: str) -> None:
        path = text.partition("\n")[0].removeprefix("# ")
        content = text if "/" not in path else text.partition("\n")[2]
        (self.folder / path).write_text(content)
        self.files.append(path)

    def _change(self, text: str) -> None:
        head, _, body = text.partition("\n")
        file = self.folder / head.removeprefix("--- ")
        lines = body.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        content = file.read_text()
        assert content.count(before) == 1, f"{file} holds {content.count(before)} ×\n{before}"
        file.write_text(content.replace(before, after))

    def _execute(self, command: str, expected: str) -> None:
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said = _stripped(done.stdout)
        if expected:
            fits = re.fullmatch(_pattern(expected), said, flags=re.DOTALL)
            assert fits, f"$ {command}\nthe page shows:\n{expected}\nit prints:\n{said}"
        else:
            assert done.returncode == 0, f"$ {command}\n{said}"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with what the page shows of its output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, _stripped(expected)


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _pattern(expected: str) -> str:
    return ".*".join(re.escape(part) for part in expected.split("…"))
