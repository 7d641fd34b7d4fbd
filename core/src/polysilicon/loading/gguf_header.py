"""Reads the header of a GGUF file: metadata and tensor table, checked against the file's length.

The `gguf` package's own reader turns every token of the vocabulary into Python objects (seconds for
a real model) and fails with numpy's errors on a damaged file, so the header is read here.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from pathlib import Path

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: More than this many strings is a vocabulary or a merge table: counted, not kept.
_MANY = 1024


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One row of the tensor table: shape in torch's order, offset from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of one GGUF file."""

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value of this architecture, e.g. `rope.freq_base`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        # The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if code == "f" else value

    def text(self) -> str:
        raw = self.skip(self.number("Q"))
        return raw.decode("utf-8", errors="replace")

    def skip(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise EOFError
        self.at += count
        return self.data[self.at - count : self.at]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        raise ValueError(f"unknown metadata type {kind}")

    def array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            return list(
                struct.unpack(code, self.skip(count * struct.calcsize("<" + _SCALARS[kind])))
            )
        if count <= _MANY:
            return [self.value(kind) for _ in range(count)]
        for _ in range(count):
            self.skip(self.number("Q"))
        return count


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises:
        LoadError: it is no GGUF file, of an unknown version, or cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != b"GGUF":
            raise LoadError(
                f"{path} starts with {magic!r}, expected b'GGUF': it is no GGUF file; "
                "a Hugging Face model is given by its folder"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data))
            except (EOFError, struct.error, OverflowError, MemoryError):
                raise LoadError(
                    f"{path} is cut off inside its header ({size} bytes): fetch it again"
                ) from None
            except ValueError as error:
                raise LoadError(f"{path} is damaged ({error}): fetch it again") from None


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    cursor.at = 4
    version, tensor_count, metadata_count = (cursor.number(code) for code in "IQQ")
    if version not in (2, 3):
        raise LoadError(f"{path} is GGUF version {version}: expected 2 or 3; convert it again")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    rows = [_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, kind, start + at) for name, shape, kind, at in rows}
    end, size = (
        max((t.offset + t.file_bytes for t in tensors.values()), default=0),
        len(cursor.data),
    )
    if end > size:
        raise LoadError(
            f"{path} is cut off: its tensor table needs {end} bytes and it has {size}; "
            "fetch it again"
        )
    if not isinstance(metadata.get("general.architecture"), str):
        raise LoadError(
            f"{path} does not say general.architecture: convert it again with llama.cpp"
        )
    return GgufHeader(
        path=path, architecture=metadata["general.architecture"], metadata=metadata, tensors=tensors
    )


def _row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = cursor.text(), cursor.number("I")
    if dims > 8:
        raise ValueError(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dims))
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise LoadError(
            f"{path} stores {name!r} in ggml type {kind}, which the installed gguf package does "
            "not know: pip install --upgrade gguf"
        ) from None
    values = math.prod(shape)
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name!r} of shape {shape} does not divide into blocks of {block}")
    return GgufTensor(
        name=name, shape=shape, kind=kind, offset=offset, file_bytes=values // block * block_bytes
    )
