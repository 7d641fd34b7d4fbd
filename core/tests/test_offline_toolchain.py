"""What is said where Triton is missing or of an unknown version, and what the compiler says."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import TYPE_CHECKING

import pytest

from polysilicon.errors import ToolchainError
from polysilicon.offline.triton_internals import require_triton

if TYPE_CHECKING:
    from pathlib import Path


def _triton(version: str) -> types.ModuleType:
    module = types.ModuleType("triton")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


def test_missing_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ToolchainError, match=r"not installed: pip install 'triton>=3.6,<3.10'"):
        require_triton()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "3.10.0.dev20270101", "4.0"])
def test_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", _triton(version))
    with pytest.raises(ToolchainError, match=f"Triton {version} is installed"):
        require_triton()


@pytest.mark.parametrize("version", ["3.6.0", "3.6.0+git1234", "3.9.0", "3.9.7"])
def test_known_version_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _triton(version)
    monkeypatch.setitem(sys.modules, "triton", module)
    assert require_triton() is module


@pytest.mark.parametrize("mode", ["w", "w+"])  # a file that can be read is captured in place
def test_what_native_code_and_python_write_to_standard_error_is_captured(
    tmp_path: Path, mode: str
) -> None:
    code = (
        "import os, sys; from polysilicon.offline.stderr import captured_stderr as captured\n"
        "os.write(2, b'before '); print('out', end=' ')\n"
        "with captured() as said: os.write(2, b'native '); sys.stderr.write('python ')\n"
        "os.write(2, b'after'); print(said)"
    )
    with (tmp_path / "stderr").open(mode) as file:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file, text=True, check=True
        )
    assert done.stdout == "out ['native python ']\n"
    kept = "native python " if mode == "w+" else ""
    assert (tmp_path / "stderr").read_text() == f"before {kept}after"
