"""The two sides of `bench cpu`: Transformers' `generate` and our engine, doing the same work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polysilicon.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request: its prompt, and exactly how many tokens are wanted."""

    prompt: tuple[int, ...]
    wanted: int


class Side(Protocol):
    """What is timed. Every method returns seconds."""

    def decode(self, work: Work) -> float:
        """From the first generated token to the last, of one request alone."""

    def prefill(self, prompt: tuple[int, ...]) -> float:
        """From the request to its first token."""

    def serve(self, works: Sequence[Work]) -> float:
        """From the first request to the last token of all."""


class Transformers:
    """Transformers' own `generate`, greedy, on a model that nothing of ours has touched.

    End-of-sequence ids are taken away, so that every request has exactly the tokens it wants; that
    is cheaper for `generate` than `min_new_tokens`, which edits the logits of every step.

    Args:
        model: the loaded model.
        compiled: static cache and compiled forward, else the eager defaults.
        batch: requests of one padded batch.
    """

    def __init__(self, model: Any, *, compiled: bool, batch: int) -> None:
        self._model, self._batch = model, batch
        config = model.generation_config
        config.eos_token_id, config.pad_token_id, config.do_sample = None, 0, False
        self._options: dict[str, Any] = {}
        if compiled:
            from transformers import CompileConfig

            compile_config = CompileConfig(mode="default", fullgraph=False)
            # generate() compiles on accelerators only, unless this says otherwise.
            compile_config._compile_all_devices = True
            self._options = {"cache_implementation": "static", "compile_config": compile_config}

    def decode(self, work: Work) -> float:
        times = _Times()
        self._generate([work.prompt], work.wanted, streamer=times)
        return times.seen[-1] - times.seen[0]

    def prefill(self, prompt: tuple[int, ...]) -> float:
        began = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - began

    def serve(self, works: Sequence[Work]) -> float:
        began = time.perf_counter()
        for start in range(0, len(works), self._batch):
            part = works[start : start + self._batch]
            # A padded batch runs until its longest request is done.
            self._generate([work.prompt for work in part], max(work.wanted for work in part))
        return time.perf_counter() - began

    def _generate(self, prompts: Sequence[tuple[int, ...]], wanted: int, **more: Any) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=wanted, **self._options, **more
        )
        assert out.shape[1] == longest + wanted


class _Times:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.seen.append(time.perf_counter())
        self._prompt_came = True

    def end(self) -> None:
        """Nothing is held back."""


class Ours:
    """Our engine, greedy, past end-of-sequence ids, without reuse between requests."""

    def __init__(self, engine: Engine) -> None:
        from polysilicon.engine import SamplingParams

        self._engine, self._params = engine, SamplingParams

    def decode(self, work: Work) -> float:
        params = self._params(max_new_tokens=work.wanted, ignore_eos=True)
        seen = [time.perf_counter() for _ in self._engine.stream(work.prompt, params)]
        assert len(seen) == work.wanted
        return seen[-1] - seen[0]

    def prefill(self, prompt: tuple[int, ...]) -> float:
        return self.serve([Work(prompt=prompt, wanted=1)])

    def serve(self, works: Sequence[Work]) -> float:
        params = [self._params(max_new_tokens=w.wanted, ignore_eos=True) for w in works]
        began = time.perf_counter()
        outputs = self._engine.generate([work.prompt for work in works], params)
        took = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise output.error
        assert [len(output.token_ids) for output in outputs] == [work.wanted for work in works]
        return took
