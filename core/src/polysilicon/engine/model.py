"""A Hugging Face model as the engine runs it: adapted, bound, with a paged cache, checked once."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.adapt import Adapted, adapt
from polysilicon.devices import require_runnable, resolve
from polysilicon.errors import AdaptError, DeviceError
from polysilicon.layers.attention import PagedBatch
from polysilicon.layers.quantized_weight import unrounded
from polysilicon.loading.loader import DTYPES
from polysilicon.loading.memory import available_bytes
from polysilicon.prepare import prepare
from polysilicon.selection import current_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from polysilicon.errors import KernelError
    from polysilicon.prepare import Row
    from polysilicon.records import Device
    from polysilicon.selection import Binding

#: Share of the free memory that the cache may take unless told how many blocks to have.
_CACHE_SHARE = 0.25

#: Graphs that all engines of a process may have together.
_MOST_GRAPHS = 256

#: Context of a model whose config names none (no positions, or relative ones).
_DEFAULT_CONTEXT = 4096

# The paged forward may differ from the dense one by rounding: this share of the largest logit.
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2}
_PROBE_TOLERANCE_OTHER = 1e-1


class PagedModel:
    """The model over paged batches; callable as the runner wants it.

    Raises:
        DeviceError: the device is unknown or absent, or its memory too small.
        AdaptError: the attention could not be adapted, or the paged forward is wrong.
    """

    def __init__(
        self,
        model: Any,
        device: str | None,
        *,
        dtype: torch.dtype | str | None,
        block_size: int,
        num_blocks: int | None,
        max_batch: int,
    ) -> None:
        self.device: Device = require_runnable(resolve(device))
        self.torch_device = torch.device(self.device.torch_device)
        if self.torch_device.type == "cpu":
            _keep_activations_on_the_heap()
        own = not isinstance(model, Adapted)
        adapted = self._adapt(model, _dtype(dtype)) if own else _as_it_is(model, _dtype(dtype))
        self._model: Any = adapted.model
        self._context = adapted.context
        self._attention, self._recurrent = adapted.attention, adapted.recurrent
        whole: Any = adapted.model.config
        config = whole.get_text_config()
        self.dtype: torch.dtype = next(self._model.parameters()).dtype
        self.vocabulary = int(config.vocab_size)
        self.context = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT)
        self.stop_ids = _stop_ids(self._model)
        self.block_size = block_size
        self.graphs: list[str] = []  # one entry a compiled graph
        self._run: Callable[..., Tensor] = self._logits
        try:
            if adapted.report.paged:
                raise AdaptError(
                    f"the engine cannot run {adapted.report.architecture}: "
                    f"{adapted.report.paged}. Its own generate() still works"
                )
            self.num_blocks = self._allocate(num_blocks, max_batch)
            self._prepared = prepare(self._model, self.device)
            with torch.inference_mode():
                self._check_paged()
        except BaseException:
            for layer in self._attention:
                layer.detach_cache()
            for state in self._recurrent:
                state.detach_state()
            if own:
                adapted.undo()
            raise

    def __call__(
        self, batch: PagedBatch, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        """Logits of the wanted rows of one paged step."""
        if self._context.owner is not self._token:
            raise AdaptError(
                "another engine was built on this model and its cache took this one's place: "
                "use one engine a model"
            )
        self._context.batch = batch
        try:
            return self._run(input_ids, position_ids, rows)
        finally:
            self._context.batch = None

    @property
    def carries_state(self) -> bool:
        """Whether sequences have a state besides their keys and values."""
        return bool(self._recurrent)

    @property
    def rows(self) -> tuple[Row, ...]:
        """op → kernel → reason, of the ops that the paged forward calls."""
        return tuple(row for row in self._prepared.rows if row.op in self._called)

    def compile(self) -> None:
        """From now on runs compiled, the whole forward in one graph a shape."""
        backend = _backend(self.device.compile_backend)

        def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            shape = next((list(x.shape) for x in inputs if isinstance(x, torch.Tensor)), [])
            self.graphs.append(f"graph {len(self.graphs) + 1}, tokens {shape}")
            return backend(graph, inputs)

        compiled = torch.compile(self._logits, backend=counted, fullgraph=True, dynamic=False)
        # One graph a shape, and the limit counts those of every engine of the process.
        self._run = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS)(compiled)

    def kernel_failed(self, error: BaseException) -> KernelError | None:
        """The error that names the kernel that raised; None where none did."""
        return self._prepared.kernel_failed(error)

    def _logits(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows
        ).logits[0]
        # Some models know no logits_to_keep and give all rows.
        return logits if logits.shape[0] == rows.shape[0] else logits[rows]

    def _adapt(self, model: Any, dtype: torch.dtype | None) -> Adapted:
        # A quantised or offloaded model refuses to be moved, so it is left alone where it can be.
        if dtype is not None and model.dtype != dtype:
            model = model.to(dtype)
        if model.device != self.torch_device:
            model = model.to(self.torch_device)
        return adapt(model, device=self.device.torch_device)

    def _allocate(self, num_blocks: int | None, max_batch: int) -> int:
        """Gives every layer its cache or its states and returns the number of blocks."""
        block_bytes = sum(layer.cache_bytes(self.block_size) for layer in self._attention)
        state_bytes = max_batch * sum(layer.state_bytes() for layer in self._recurrent)
        free = free_bytes(self.device)
        if num_blocks is None:
            num_blocks = max_batch * -(-self.context // self.block_size)
            if block_bytes:
                room = int(free * _CACHE_SHARE) - state_bytes
                num_blocks = min(num_blocks, max(room, 0) // block_bytes)
        needed = max(num_blocks, 1) * block_bytes + state_bytes
        if num_blocks < 1 or needed > free:
            states = f", {state_bytes / 1e9:.2f} GB of it states of {max_batch} sequences"
            raise DeviceError(
                f"{self.device.name} has {free / 1e9:.2f} GB free and the KV cache needs "
                f"{needed / 1e9:.2f} GB ({max(num_blocks, 1)} blocks"
                f"{states if state_bytes else ''}): free memory, give fewer num_blocks or a "
                "smaller max_batch, or choose a smaller model or dtype"
            )
        layout = current_table().layout(self.device, "kv_block").record
        for layer in self._attention:
            layer.allocate_cache(
                num_blocks, self.block_size, device=self.torch_device, layout=layout
            )
        for state in self._recurrent:
            state.allocate_states(max_batch, device=self.torch_device)
        self._token = self._context.owner = object()
        return num_blocks

    def _check_paged(self) -> None:
        """Compares a short prompt, computed in two paged steps, with the dense forward."""
        tokens = min(self.block_size + 3, self.block_size * self.num_blocks, self.context)
        ids = (torch.arange(tokens) * 7919 + 11) % self.vocabulary
        dense = self._dense_probe(ids)
        if not dense.isfinite().all():
            raise AdaptError(
                f"{type(self._model).__name__} gives NaN or infinite logits by itself, in "
                f"{str(self.dtype).removeprefix('torch.')}: check its weights, or run it in float32"
            )
        with self._noting_calls():
            paged = self._paged_steps(ids)
        with unrounded(self._model) as rounding:
            if rounding:
                dense, paged = self._dense_probe(ids), self._paged_steps(ids)
        difference = (torch.cat(paged).float() - dense.float()).abs().max().item()
        largest = dense.float().abs().max().item()
        bound = _PROBE_TOLERANCE.get(dense.dtype, _PROBE_TOLERANCE_OTHER)
        if not difference <= bound * max(largest, 1.0):
            raise AdaptError(
                f"{type(self._model).__name__} gives other logits with the paged cache than "
                f"without: they differ by {difference:.2e}, the largest is {largest:.2e}. "
                "The engine cannot run this model; its own generate() still works"
            )

    def _dense_probe(self, ids: Tensor) -> Tensor:
        positions = torch.arange(len(ids))
        return self._logits(
            *(x.to(self.torch_device) for x in (ids[None], positions[None], positions))
        )

    def _paged_steps(self, ids: Tensor) -> list[Tensor]:
        """Logits of the ids in two steps through the paged cache."""
        end = len(ids)
        return [
            self._paged_probe(ids, torch.arange(end), first, last)
            for first, last in ((0, end // 2), (end // 2, end))
            if last > first
        ]

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        """Notes which ops run: a layer is bound for all its forms, the engine uses some of them."""
        self._called: set[str] = set()
        slots = [(self._model.get_submodule(b.layer), b) for b in self._prepared.bound]
        for layer, bound in slots:
            layer.bind_kernel(bound.attribute, self._noted(bound.binding), bound.binding.dtypes)
        try:
            yield
        finally:
            for layer, bound in slots:
                layer.bind_kernel(bound.attribute, bound.binding.fn, bound.binding.dtypes)

    def _noted(self, binding: Binding) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._called.add(binding.problem.op)
            return binding.fn(*args, **kwargs)

        return call

    def _paged_probe(self, ids: Tensor, positions: Tensor, start: int, end: int) -> Tensor:
        used = -(-len(ids) // self.block_size)
        host = {
            "slots": positions[start:end],
            "block_tables": torch.arange(used, dtype=torch.int32)[None],
            "query_starts": torch.tensor([0, end - start], dtype=torch.int32),
            "kv_lengths": torch.tensor([end], dtype=torch.int32),
            "state_slots": torch.zeros(1, dtype=torch.int32),
        }
        batch = PagedBatch(
            **{name: x.to(self.torch_device) for name, x in host.items()},
            max_query=end - start,
            max_kv=end,
        )
        step = (ids[None, start:end], positions[None, start:end], torch.arange(end - start))
        return self(batch, *(x.to(self.torch_device) for x in step))


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one to run in: one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _as_it_is(adapted: Adapted, dtype: torch.dtype | None) -> Adapted:
    found = next(adapted.model.parameters()).dtype
    if dtype not in (None, found):
        raise ValueError(
            f"the model was adapted in {found} and {dtype} was asked for: leave dtype out, or call "
            "undo() and give the engine the model itself"
        )
    return adapted


def free_bytes(device: Device) -> int:
    """Memory of a device that is free now."""
    kind = torch.device(device.torch_device).type
    if kind == "cpu":
        return available_bytes()
    module = torch.get_device_module(kind)
    free, _ = module.mem_get_info(device.torch_device)
    return int(free)


def _keep_activations_on_the_heap() -> None:
    """Raises the size up to which glibc reuses freed memory instead of handing it back.

    The threshold follows the largest freed mapping, 32 MB at most. Below it an activation of a
    few hundred tokens costs page faults at every call: ten times the time of an add and norm.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _stop_ids(model: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation config, which may name one, several or none."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def _backend(name: str) -> Callable[..., Any]:
    """A torch.compile backend by its registered name, or by `module:attribute`."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return found
    return torch._dynamo.lookup_backend(name)
