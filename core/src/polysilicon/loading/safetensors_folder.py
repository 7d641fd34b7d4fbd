"""The weights of a local Hugging Face folder: headers checked before anything is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where one tensor lies: file, first byte, shape and stored dtype."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file of the model folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(
            f"{path} does not exist: a Hugging Face model folder holds config.json beside its "
            "*.safetensors; give the folder that save_pretrained wrote, or a .gguf file"
        ) from None
    except (ValueError, OSError) as error:
        raise LoadError(f"{path} is not readable JSON ({error}): fetch the file again") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def weight_entries(folder: Path) -> dict[str, Entry]:
    """Tensor name → place, for every safetensors weight of the folder.

    Raises:
        LoadError: a shard is missing, cut off or damaged, or the index and the shards disagree.
    """
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    raise LoadError(f"{folder} has no weights: expected {SINGLE}, or {INDEX} with its shards")


def shards(index: Path) -> dict[str, set[str]]:
    """Shard file name → names of the tensors that an index file places in it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index} has no weight_map (tensor name → shard file): fetch it again")
    files: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard:
            raise LoadError(f"{index} places {tensor!r} in {shard!r}: expected a file beside it")
        files.setdefault(shard, set()).add(tensor)
    missing = sorted(name for name in files if not (index.parent / name).is_file())
    if missing:
        raise LoadError(
            f"{index.parent} lacks {len(missing)} of {len(files)} shards that {index.name} names: "
            f"{', '.join(missing[:3])}; fetch the missing files"
        )
    return files


def _sharded(folder: Path) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for shard, wanted in sorted(shards(folder / INDEX).items()):
        found = _header(folder / shard)
        absent = sorted(wanted - found.keys())
        if absent:
            raise LoadError(
                f"{INDEX} says that {shard} holds {absent[0]!r}"
                f"{f' and {len(absent) - 1} more' if len(absent) > 1 else ''}, but it does not: "
                "index and shards are of different checkpoints; fetch both again"
            )
        entries.update((name, found[name]) for name in wanted)
    return entries


def _header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise LoadError(
                f"{path} is cut off inside its header ({size} bytes), or is no safetensors file: "
                "fetch it again"
            )
        raw = file.read(length)
    try:
        table = json.loads(raw)
        table.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, name, item) for name, item in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{path} has a damaged safetensors header ({error}): fetch it again"
        ) from None
    end = max((e.offset + e.nbytes for e in entries.values()), default=0)
    if end > size:
        raise LoadError(
            f"{path} is cut off: its header needs {end} bytes and it has {size}; fetch it again"
        )
    return entries


def _entry(path: Path, data_start: int, name: str, item: dict[str, Any]) -> Entry:
    if item["dtype"] not in _DTYPES:
        raise LoadError(
            f"{path} stores {name!r} as {item['dtype']}: expected one of {', '.join(_DTYPES)}; "
            "use another checkpoint of this model"
        )
    dtype, shape = _DTYPES[item["dtype"]], tuple(int(n) for n in item["shape"])
    begin, end = item["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} and {item['dtype']} has {end - begin} bytes")
    return Entry(path=path, offset=data_start + begin, shape=shape, dtype=dtype)
