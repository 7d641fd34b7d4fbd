"""Writes `kernels/triton/exported` from the programs in Helion; `--check` compares instead.

`python -m polysilicon.kernels.helion.export [--check]`. Helion generates a Triton program and the
host function that launches it for each example call. Here its own helpers are replaced by those of
`exported/language.py`, and types of the example by those of the arguments.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

OPS = ("rms_norm_quant", "silu_and_mul_quant", "gated_delta_rule")
FOLDER = Path(__file__).parents[1] / "triton" / "exported"

#: What Helion generates → what exported programs call. Nothing else may be left of its imports.
_CALLS = {
    "tl_math.abs": "tl.abs",
    "libdevice.exp": "tl.exp",
    "libdevice.rsqrt": "tl.rsqrt",
    "libdevice.nearbyint": "language.nearest",
    "triton_helpers.maximum": "language.maximum",
    "triton_helpers.minimum": "language.minimum",
    "triton_helpers.div_floor_integer": "language.quotient",
    "helion_triton_helpers.max_propagate_nan": "language.max_propagate_nan",
    "_default_launcher": "language.launch",
}
_FOREIGN = re.compile(r"\b(libdevice|tl_math|(helion_)?triton_helpers|helion|hl)\.")

_HEADER = '''# mypy: ignore-errors
# ruff: noqa
"""Exported from kernels/helion/{op}.py by Helion {version}; do not edit.

`python -m polysilicon.kernels.helion.export` writes it anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from polysilicon.kernels.triton.exported import language
'''


def exported(op: str) -> str:
    """The module that holds the programs of an op.

    Raises:
        ValueError: Helion calls a helper that has no counterpart here.
    """
    source = importlib.import_module(f"polysilicon.kernels.helion.{op}")
    parts = []
    for name, arguments in source.examples().items():
        code = source.compiled.bind(arguments).to_triton_code(source.CONFIG)
        parts.append(_program(code, name, source.TYPES))
    text = "\n\n".join(parts)
    left = _FOREIGN.search(text)
    if left is not None:
        raise ValueError(
            f"the exported {op} calls {text[left.start() :].split('(')[0]}: give it a counterpart "
            f"in {FOLDER / 'language.py'} and name that in {__name__}"
        )
    return _HEADER.format(op=op, version=version("helion")) + "\n" + text


def _program(code: str, name: str, types: dict[str, str]) -> str:
    """One program and its host function out of a module that Helion generated."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("# src[")]
    start = next(n for n, line in enumerate(lines) if line.startswith(("_BLOCK", "@triton")))
    text = "\n".join(lines[start:]).strip() + "\n"
    for old, new in {**_CALLS, **types}.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}\b", new, text)
    # Several programs share a module: each has names of its own.
    constants = set(re.findall(r"^_BLOCK_SIZE_\d+", text, re.MULTILINE))
    for constant in constants:
        text = re.sub(rf"\b{constant}\b", f"{constant}_{name}", text)
    text = text.replace("_helion_program", f"_{name}").replace("def program(", f"def {name}(")
    return re.sub(r": (?:(?:torch\.)?Tensor|hl\.constexpr)\b", "", text)


def main(arguments: list[str]) -> Any:
    """Writes or compares; the exit status says whether anything differs."""
    if arguments not in ([], ["--check"]):
        return "usage: python -m polysilicon.kernels.helion.export [--check]"
    texts = {FOLDER / f"{op}.py": exported(op) for op in OPS}
    if arguments:
        old = [str(file) for file, text in texts.items() if file.read_text() != text]
        return f"not what its source exports: {', '.join(old)}" if old else 0
    for file, text in texts.items():
        file.write_text(text)
        print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
