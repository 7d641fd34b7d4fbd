"""Tensors that stay in their file until a model asks for them, one at a time.

A weight is read (and dequantised) in slices straight into its final dtype, so the transient memory
of a load is one slice, not one tensor. Nothing is mapped: a model does not depend on its file after
loading, and its memory is counted where it is used.
"""

from __future__ import annotations

import math
import os
import threading
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import EllipsisType

    Convert = Callable[["np.ndarray"], "np.ndarray"]

#: Values per slice: 4 MiB of float32, enough to read at full speed.
SLICE = 1 << 20


class LazyTensor(Protocol):
    """What Transformers' loader needs of a state-dict value that is not yet in memory."""

    shape: tuple[int, ...]

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """Reads the whole tensor."""


class WeightFile:
    """An open weight file that several threads may read at any offset."""

    def __init__(self, path: Path, on_bytes: Callable[[int], None]) -> None:
        self.path = path
        self._on_bytes = on_bytes
        self._file = path.open("rb", buffering=0)
        self._local = threading.local()

    def scratch(self, dtype: torch.dtype) -> torch.Tensor:
        """This thread's slice buffer: one for all tensors, or the heap fills with holes."""
        buffers: dict[torch.dtype, torch.Tensor] = vars(self._local).setdefault("buffers", {})
        if dtype not in buffers:
            buffers[dtype] = torch.empty(SLICE, dtype=dtype)
        return buffers[dtype]

    def read_into(self, target: np.ndarray, offset: int) -> None:
        """Fills a contiguous uint8 array from the file."""
        view, done = memoryview(target.data), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise EOFError(f"{self.path} ended at byte {offset + done} while it was being read")
            done += count
        self._on_bytes(done)

    def close(self) -> None:
        self._file.close()


class PlainTensor:
    """A tensor stored as plain values (safetensors)."""

    def __init__(
        self,
        file: WeightFile,
        *,
        offset: int,
        shape: tuple[int, ...],
        stored: torch.dtype,
        wanted: torch.dtype,
    ) -> None:
        self.shape = shape
        self._file, self._offset, self._stored = file, offset, stored
        # Integers and booleans (masks, tables) keep their type; only floats are converted.
        self._wanted = wanted if stored.is_floating_point else stored

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        out = torch.empty(math.prod(self.shape), dtype=self._wanted)
        if self._wanted == self._stored:
            self._read(out, 0)
            return out.view(self.shape)
        for start in range(0, out.numel(), SLICE):
            target = out[start : start + SLICE]
            stored = self._file.scratch(self._stored)[: target.numel()]
            self._read(stored, start)
            target.copy_(stored)
        return out.view(self.shape)

    def _read(self, target: torch.Tensor, start: int) -> None:
        if target.numel():
            as_bytes = target.view(torch.uint8).numpy()
            self._file.read_into(as_bytes, self._offset + start * self._stored.itemsize)


class QuantizedTensor:
    """A tensor of a GGUF file: dequantised row by row, or whole where its values are rearranged."""

    def __init__(
        self,
        file: WeightFile,
        *,
        offset: int,
        file_bytes: int,
        shape: tuple[int, ...],
        dequantize: Convert,
        wanted: torch.dtype,
        rearrange: Convert | None,
    ) -> None:
        self.shape = shape
        self.file_bytes = file_bytes
        self._file, self._offset, self._wanted = file, offset, wanted
        self._dequantize, self._rearrange = dequantize, rearrange

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        if self._rearrange is not None:
            values = self._rearrange(self._rows(0, self._row_count).reshape(self.shape))
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._wanted)
        out = torch.empty((self._row_count, self.shape[-1]), dtype=self._wanted)
        step = max(1, SLICE // self.shape[-1])
        for start in range(0, self._row_count, step):
            stop = min(start + step, self._row_count)
            out[start:stop].copy_(torch.from_numpy(self._rows(start, stop)))
        return out.view(self.shape)

    @property
    def _row_count(self) -> int:
        return math.prod(self.shape[:-1])

    def _rows(self, start: int, stop: int) -> np.ndarray:
        row_bytes = self.file_bytes // self._row_count
        raw = np.empty((stop - start, row_bytes), dtype=np.uint8)
        self._file.read_into(raw.reshape(-1), self._offset + start * row_bytes)
        return self._dequantize(raw)


class StackedTensor:
    """Tensors of a checkpoint in one: each expert's joined along a dim, experts stacked.

    Args:
        experts: of each expert, its parts in order.
        dim: where an expert's parts are joined.
        sizes: along `dim`, of each part; one number is repeated to fill it.
        shape: of the whole.
        dtype: of the parts, which stay as they are.
    """

    def __init__(
        self,
        experts: Sequence[Sequence[LazyTensor]],
        *,
        dim: int,
        sizes: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.shape = shape
        self._experts, self._dim, self._sizes, self._dtype = experts, dim, sizes, dtype

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=self._dtype)
        for target, parts in zip(out, self._experts, strict=True):
            places = target.split(list(self._sizes), self._dim)
            for place, part in zip(places, parts, strict=True):
                place.copy_(part[...])
        return out


class MappedTensor:
    """A tensor of a mapped pickle file, copied out of the mapping when it is asked for."""

    def __init__(self, tensor: torch.Tensor, wanted: torch.dtype) -> None:
        self.shape = tuple(tensor.shape)
        self._tensor, self._wanted = tensor, wanted

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        wanted = self._wanted if self._tensor.is_floating_point() else self._tensor.dtype
        return self._tensor.to(wanted, copy=True)
