"""Core names no vendor and imports no vendor library; heavy libraries stay in their folders."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import polysilicon

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(polysilicon.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

VENDORS = """
nvidia amd intel cuda cudnn cublas nvml nvcc rocm hip hipblas aiter spyre sendnn tpu xla
jax pallas torch_xla torch_tpu torch_spyre torch_npu mps mlx xpu hpu npu sm80 sm89 sm90
sm100 gfx942 h100 h200 mi300x pynvml amdsmi flash_attn flashinfer vllm_flash_attn cutlass
"""
_WORD = re.compile(rf"(?:^|[^a-z0-9])({'|'.join(VENDORS.split())})(?:$|[^a-z0-9])", re.IGNORECASE)

#: What only these folders may import.
HOMES = {
    "vllm": ("integrations/vllm",),
    # The benchmarks measure against it.
    "transformers": ("adapt", "engine", "loading", "bench/cpu", "bench/parts"),
    "gguf": ("loading",),
    "pluggy": ("plugins.py", "hookspecs.py", "api.py", "bench/dispatch.py"),
}


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def _prose(tree: ast.AST) -> set[int]:
    """Ids of the strings that are text for people: docstrings, and whatever is raised or said."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))  # docstrings, also of attributes
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.keyword) and node.arg in ("help", "note", "source")
        ):
            found |= {id(child) for child in ast.walk(node)}
    return found


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every identifier and every string that a program could act on."""
    prose = _prose(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield line, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield line, node.name
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
        ):
            yield line, node.value


def _relative(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("file", FILES, ids=_relative)
def test_core_names_no_vendor(file: Path) -> None:
    if _relative(file).startswith("integrations/vllm"):
        pytest.skip("describes devices to vLLM, whose own enumeration names vendors")
    tree = ast.parse(file.read_text())
    found = [f"line {line}: {text[:60]!r}" for line, text in _names(tree) if _WORD.search(text)]
    assert found == []


@pytest.mark.parametrize("file", FILES, ids=_relative)
def test_imports_stay_in_their_folders(file: Path) -> None:
    for line, module in _imports(ast.parse(file.read_text())):
        top = module.partition(".")[0]
        assert not _WORD.search(top) or top == "vllm", f"line {line} imports {module}"
        if top in HOMES:
            allowed = any(_relative(file).startswith(home) for home in HOMES[top])
            assert allowed, f"line {line} imports {module}: only {HOMES[top]} may"


def test_the_check_finds_what_it_is_for() -> None:
    tree = ast.parse('"""About cuda."""\nx = torch.cuda\ny = "nvidia:h200"\nraise E("no cuda")\n')
    assert [line for line, text in _names(tree) if _WORD.search(text)] == [2, 3]
