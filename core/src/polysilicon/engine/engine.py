"""The embedded engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import secrets
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.engine.model import PagedModel
from polysilicon.engine.pool import BlockPool
from polysilicon.engine.report import Report, Totals
from polysilicon.engine.request import Request, SamplingParams, Update, check_prompt
from polysilicon.engine.runner import Buckets, Runner
from polysilicon.engine.sampler import Sampler
from polysilicon.engine.scheduler import Scheduler
from polysilicon.engine.text import Texts
from polysilicon.errors import KernelError, PolysiliconError, RequestError
from polysilicon.loading import Loaded
from polysilicon.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.engine.request import FinishReason, Output
    from polysilicon.engine.scheduler import Work

    Prompt = str | Sequence[int]


class Engine:
    """Runs one model for many requests in one process.

    Args:
        model: what `load()` or `adapt()` gave, or a Transformers causal LM (adapted in place).
        tokenizer: needed for text prompts; a loaded model brings its own.
        device: name of the device, as `polysilicon devices` lists it; None takes the current one.
        dtype: dtype to run in; None keeps the model's.
        max_batch: most requests in one step.
        block_size: tokens of one block of the KV cache.
        num_blocks: size of the cache; None takes a share of the free memory.
        max_tokens_per_step: longer prompts are computed in chunks of this size.
        compile: whether to use torch.compile; None leaves it to the device.
        prefix_sharing: reuse the cache of equal beginnings; None does so unless the model carries
            a recurrent state, which no block of the cache holds. The report tells.

    Example:
        >>> engine = Engine(load("smollm2"))  # doctest: +SKIP
        >>> engine.generate(["Once upon a time"])[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        device: str | None = None,
        dtype: torch.dtype | str | None = None,
        max_batch: int = 8,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_tokens_per_step: int = 512,
        compile: bool | None = None,
        prefix_sharing: bool | None = None,
    ) -> None:
        _check_sizes(
            max_batch=max_batch,
            block_size=block_size,
            num_blocks=num_blocks,
            max_tokens_per_step=max_tokens_per_step,
        )
        if isinstance(model, str):
            raise TypeError(f"model is the text {model!r}: load it first, Engine(load({model!r}))")
        if isinstance(model, Loaded):
            model, tokenizer = model.model, tokenizer or model.tokenizer
        if not isinstance(model, PagedModel):
            model = PagedModel(
                model,
                device,
                dtype=dtype,
                block_size=block_size,
                num_blocks=num_blocks,
                max_batch=max_batch,
            )
        self._model: PagedModel = model
        self._texts = None if tokenizer is None else Texts(tokenizer)
        if prefix_sharing and model.carries_state:
            raise ValueError(
                "prefix_sharing was asked for and the model carries recurrent states, which cannot "
                "be taken up in the middle of a prompt: leave prefix_sharing out"
            )
        sharing = not model.carries_state if prefix_sharing is None else prefix_sharing
        self.pool = BlockPool(model.num_blocks, model.block_size, sharing=sharing)
        compiled = model.device.compile_default if compile is None else compile
        buckets = Buckets(
            model.device.token_buckets, max_batch=max_batch, max_tokens=max_tokens_per_step
        )
        self._scheduler = Scheduler(
            self.pool,
            max_batch=max_batch,
            max_tokens_per_step=max_tokens_per_step,
            sizes=buckets.mixed_sizes if compiled else (),
        )
        self._runner = Runner(
            model,
            model.torch_device,
            max_batch=max_batch,
            max_tokens=max_tokens_per_step,
            block_size=model.block_size,
            max_blocks=min(self.pool.blocks_for(model.context), model.num_blocks),
            buckets=buckets if compiled else None,
            carries_state=model.carries_state,
        )
        self._sampler = Sampler(model.vocabulary, model.dtype)
        self._sampler_bound = prepare(self._sampler, model.device)
        self._live: dict[int, Request] = {}
        self._unclaimed: deque[Update] = deque()
        self._ids = itertools.count()
        self._totals = Totals()
        if compiled:
            model.compile()
            for shape in self._runner.shapes:
                with torch.inference_mode():
                    self._runner.warm_up(shape)
        self._warm_graphs = len(model.graphs)

    # --- requests ------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stream: bool = False
    ) -> int:
        """Queues a request and returns its id; `step()` advances it.

        Args:
            prompt: a text, or token ids.
            params: how to sample and when to end; greedy by default.
            stream: whether updates carry text as it becomes final.

        Raises:
            RequestError: the request is wrong or can never fit. Nothing else is affected.
        """
        params = params or SamplingParams()
        ids = check_prompt(
            self._encode(prompt), vocabulary=self._model.vocabulary, context=self._model.context
        )
        if params.stop and self._texts is None:
            raise RequestError("stop texts need a tokenizer: give the engine one, or use stop_ids")
        ends = frozenset() if params.ignore_eos else self._end_ids()
        request = Request(
            id=next(self._ids),
            tokens=ids,
            prompt_tokens=len(ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            limit=min(len(ids) + params.max_new_tokens, self._model.context),
            stop_ids=ends | frozenset(params.stop_ids),
            streams=stream or bool(params.stop),
            text=self._texts.stream(params.stop) if self._texts else None,
        )
        self._scheduler.add(request)
        self._live[request.id] = request
        return request.id

    def cancel(self, request_id: int) -> Output:
        """Ends a request now and returns what it has; its blocks are free at once.

        Raises:
            KeyError: there is no such request, or it has ended.
        """
        if request_id not in self._live:
            raise KeyError(f"request {request_id} is not running or waiting: it may have ended")
        return self._finish(self._live[request_id], "cancelled")

    def has_work(self) -> bool:
        """Whether any request has not ended yet, or some update was not returned yet."""
        return bool(self._live or self._unclaimed)

    def encode_chat(
        self, messages: Sequence[dict[str, str]], known: Sequence[int] = ()
    ) -> list[int]:
        """Token ids of a conversation; see `Texts.encode_chat` for `known`."""
        if self._texts is None:
            raise RequestError("a conversation needs a tokenizer: give the engine one")
        return self._texts.encode_chat(messages, known)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._texts is not None and self._texts.has_chat_template

    # --- running -------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Computes one step for all requests that it has room for; their updates."""
        updates = list(self._unclaimed)
        self._unclaimed.clear()
        return updates + self._step()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Runs prompts to their end, batched, and returns their results in order.

        A request that fails while running has its `error` set; the others are not affected.

        Raises:
            RequestError: a prompt is wrong; names which. None of them was started then.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one text: expected a list of prompts, so write [prompt]")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} params: give one for each")
        wanted: list[int] = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                wanted.append(self.add_request(prompt, one))
            except RequestError as error:
                for request_id in wanted:
                    self.cancel(request_id)
                raise RequestError(f"prompt {index}: {error}") from error
        outputs: dict[int, Output] = {}
        try:
            while len(outputs) < len(wanted):
                for update in self._step():
                    if update.request_id not in wanted:
                        self._unclaimed.append(update)
                    elif update.output is not None:
                        outputs[update.request_id] = update.output
        finally:
            self._cancel_live(wanted)
        return [outputs[request_id] for request_id in wanted]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """Yields one request's updates as they come: text that is final, at last the output.

        Leaving the loop early cancels the request.

        Raises:
            RequestError: the prompt is wrong.
            KernelError: a kernel raised while it ran.
        """
        request_id = self.add_request(prompt, params, stream=True)
        updates = self._updates_of(request_id)
        # A generator that was never begun runs no `finally`: what that would cancel, this does.
        weakref.finalize(updates, self._cancel_live, [request_id]).atexit = False
        return updates

    def _updates_of(self, request_id: int) -> Iterator[Update]:
        try:
            while request_id in self._live:
                for update in self._step():
                    if update.request_id != request_id:
                        self._unclaimed.append(update)
                        continue
                    if update.output is not None and update.output.error is not None:
                        raise update.output.error
                    yield update
        finally:
            self._cancel_live([request_id])

    def _cancel_live(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id in self._live:
                self.cancel(request_id)

    def report(self) -> Report:
        """What was done so far, and which kernel serves every op and why."""
        device = self._model.device
        totals = self._totals
        return Report(
            device=f"{device.name} (simulated)" if device.simulated else device.name,
            ops=(*self._model.rows, *self._sampler_bound.rows),
            tokens=totals.tokens,
            ttft_s=totals.ttft_s,
            tokens_per_s=totals.tokens / totals.seconds if totals.seconds else 0.0,
            prefilled_tokens=totals.prefilled,
            reused_tokens=totals.reused,
            recomputed_tokens=totals.recomputed,
            preemptions=self._scheduler.preemptions,
            steps=totals.steps,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            prefix_sharing=self.pool.sharing,
            carries_state=self._model.carries_state,
            compiled_graphs=self._warm_graphs,
            compiled_while_serving=tuple(self._model.graphs[self._warm_graphs :]),
        )

    # --- one step ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> list[Update]:
        works = self._scheduler.plan()
        if not works:
            return []
        began = time.perf_counter()
        try:
            sampled, failed = self._compute(works)
        except BaseException:
            # Interrupted, by the user perhaps: what was planned is not in the cache.
            self._scheduler.abandon(works)
            raise
        now = time.perf_counter()
        updates = failed + [self._take(request, token, now) for request, token in sampled]
        self._totals.add_step(len(sampled), time.perf_counter() - began)
        return updates

    def _compute(self, works: list[Work]) -> tuple[list[tuple[Request, int]], list[Update]]:
        """Requests with their new tokens, and the updates of those that failed."""
        try:
            return self._run(works), []
        except Exception as error:
            return self._compute_alone(works, error)

    def _run(self, works: list[Work]) -> list[tuple[Request, int]]:
        logits = self._runner.run(works)
        requests = [work.request for work in works if work.samples]
        tokens = self._sampler(logits, requests) if requests else []
        for work in works:
            self._scheduler.done(work)
        return list(zip(requests, tokens, strict=True))

    def _compute_alone(
        self, works: list[Work], error: Exception
    ) -> tuple[list[tuple[Request, int]], list[Update]]:
        """After a failed step: each request alone, so that only those fail that must."""
        spoiled: set[int] = set()  # blocks whose content a failed request owes
        sampled: list[tuple[Request, int]] = []
        failed: list[Update] = []
        for work in works:
            if not spoiled.isdisjoint(work.request.blocks):
                spoiled |= self._scheduler.roll_back(work)
                self._scheduler.preempt(work.request)
                continue
            try:
                if len(works) == 1:
                    raise error
                sampled += self._run_again(work)
            except Exception as own:
                spoiled |= self._scheduler.roll_back(work)
                output = self._finish(work.request, "error", self._failure(own))
                failed.append(Update(request_id=work.request.id, output=output))
        return sampled, failed

    def _run_again(self, work: Work) -> list[tuple[Request, int]]:
        """Work of a failed step by itself.

        Some layers have moved its state on and others have not, so that is computed anew.
        """
        if self._model.carries_state:
            for piece in self._scheduler.replayed(work):
                self._runner.run([piece])
        return self._run([work])

    def _failure(self, error: Exception) -> Exception:
        """What to tell a request whose step raised: names the kernel if one is to blame."""
        if isinstance(error, PolysiliconError):
            return error
        device = self._model.device.name
        told = self._model.kernel_failed(error) or self._sampler_bound.kernel_failed(error)
        if told is None:
            told = KernelError(
                f"the model raised on {device}, outside of any kernel of ours: "
                f"{type(error).__name__}: {error}"
            )
        told.__cause__ = error
        return told

    def _take(self, request: Request, token: int, now: float) -> Update:
        """Adds a sampled token to its request, which may end it."""
        if token < 0:
            error = KernelError(
                f"the logits after token {len(request.tokens)} are NaN or infinite on "
                f"{self._model.device.name}: run in float32 or bfloat16, and check the weights"
            )
            output = self._finish(request, "error", error)
            return Update(request_id=request.id, output=output)
        request.tokens.append(token)
        if request.first_token is None:
            request.first_token = now
        text = request.text if request.streams else None
        reason: FinishReason | None = None
        if token in request.stop_ids or (text is not None and text.add(token)):
            reason = "stop"
        elif len(request.tokens) >= request.limit:
            reason = "length"
        ended = self._finish(request, reason) if reason else None
        piece = text.take() if text is not None else ""
        return Update(request_id=request.id, token_id=token, text=piece, output=ended)

    def _finish(
        self, request: Request, reason: FinishReason, error: Exception | None = None
    ) -> Output:
        request.finished = time.perf_counter()
        request.finish_reason, request.error = reason, error
        self._scheduler.finish(request)
        del self._live[request.id]
        if request.text is not None:
            made = request.tokens[request.prompt_tokens :]
            if not request.streams:
                ended = reason == "stop" and made[-1] in request.stop_ids
                request.text.add(*(made[:-1] if ended else made))
            request.text.close()
        self._totals.add_request(request)
        return request.output()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._texts is None:
            raise RequestError("the prompt is text and there is no tokenizer: give token ids")
        return self._texts.encode(prompt)

    def _end_ids(self) -> frozenset[int]:
        own = self._model.stop_ids
        return own | self._texts.stop_ids if self._texts else own


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, int) and size >= 1):
            raise ValueError(f"{name} is {size!r}: expected a whole number of at least 1")
