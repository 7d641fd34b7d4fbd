"""What a request asks for, how far it has come, and what it gave."""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from polysilicon.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

    from polysilicon.engine.text import TextStream

    FinishReason = Literal["stop", "length", "cancelled", "error"]


#: Parameters become int64 tensors.
_LARGEST = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Attributes:
        max_new_tokens: most tokens to generate; the model's context may end it earlier.
        temperature: 0 takes the most likely token; higher is more random.
        top_k: keep the k most likely tokens, 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability, 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one's probability.
        repetition_penalty: above 1 makes tokens that already occurred less likely.
        seed: same seed and prompt, same tokens, whatever else is in the batch; None draws one.
        stop: texts that end the request; the text is cut before them.
        stop_ids: token ids that end the request, besides the model's end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, at_least=1, remedy="ask for at least 1")
        _check_int("top_k", self.top_k, at_least=0, remedy="0 turns it off")
        _check_float("temperature", self.temperature, 0.0, math.inf, remedy="0 is greedy")
        _check_float("min_p", self.min_p, 0.0, 1.0, remedy="0 turns it off")
        _check_float("top_p", self.top_p, 0.0, 1.0, remedy="1 turns it off", above=True)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            math.inf,
            "1 turns it off",
            above=True,
        )
        if self.seed is not None:
            _check_int("seed", self.seed, at_least=0, remedy="or leave it out to draw one")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(
                f"stop is {self.stop!r}: expected a tuple of texts, none of them empty"
            )
        for token in self.stop_ids:
            _check_int("stop_ids", token, at_least=0, remedy="give token ids of this model")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))


def _check_int(name: str, value: object, *, at_least: int, remedy: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not at_least <= value <= _LARGEST:  # type: ignore[operator]
        raise RequestError(
            f"{name} is {value!r}: expected a whole number from {at_least} to 2^63 - 1; {remedy}"
        )


def _check_float(
    name: str, value: object, low: float, high: float, remedy: str, *, above: bool = False
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and (low < value <= high if above else low <= value <= high)  # type: ignore[operator]
    if not inside or math.isinf(value):  # type: ignore[arg-type]
        sign = ">" if above else ">="
        upper = "" if math.isinf(high) else f" and <= {high:g}"
        raise RequestError(
            f"{name} is {value!r}: expected a finite number {sign} {low:g}{upper}; {remedy}"
        )


def check_prompt(prompt: Sequence[int], *, vocabulary: int, context: int) -> list[int]:
    """The prompt as a list of ids.

    Raises:
        RequestError: it is empty, longer than the context allows, or has ids out of range.
    """
    ids = [_whole(token) for token in prompt]
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    for position, token in enumerate(ids):
        if token is None or not 0 <= token < vocabulary:
            raise RequestError(
                f"token {prompt[position]!r} at position {position} of the prompt is not an id of "
                f"this model: expected whole numbers from 0 to {vocabulary - 1}"
            )
    if len(ids) >= context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the context holds {context}, one of which must "
            "stay free for the answer: shorten the prompt"
        )
    return cast("list[int]", ids)


def _whole(token: object) -> int | None:
    """The token as an int: numpy's integers and tensors of one are welcome."""
    try:
        return None if isinstance(token, bool) else operator.index(cast("SupportsIndex", token))
    except TypeError:
        return None


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One request inside the engine. `tokens` is the prompt and all that was generated so far."""

    id: int
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams
    seed: int = 0
    limit: int = 0  # tokens at which it ends, prompt included
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    streams: bool = False  # its text is followed token by token, not only at the end
    # Kept by the scheduler:
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    state_slot: int = -1  # its row in the states of recurrent layers, while it runs
    computed: int = 0  # leading tokens whose keys and values are in the cache
    published: int = 0  # leading blocks that were offered for sharing
    highest: int = 0  # most tokens ever computed; below it, work is recomputation
    # For the report:
    prefilled: int = 0
    reused: int = 0
    recomputed: int = 0
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def output(self) -> Output:
        """The result of a finished request."""
        end = time.perf_counter() if self.finished is None else self.finished
        made = len(self.tokens) - self.prompt_tokens
        rate = 0.0
        if self.first_token is not None and made > 1:
            rate = (made - 1) / max(end - self.first_token, 1e-9)
        return Output(
            request_id=self.id,
            text=self.text.whole if self.text else "",
            token_ids=tuple(self.tokens[self.prompt_tokens :]),
            prompt_tokens=self.prompt_tokens,
            finish_reason=self.finish_reason or "cancelled",
            error=self.error,
            ttft_s=None if self.first_token is None else self.first_token - self.arrived,
            tokens_per_s=rate,
            prefilled_tokens=self.prefilled,
            reused_tokens=self.reused,
            recomputed_tokens=self.recomputed,
            preemptions=self.preemptions,
        )


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one request gave.

    Attributes:
        text: generated text, special tokens and stop texts left out; empty without a tokenizer.
        token_ids: generated tokens, the one that ended it included.
        finish_reason: `stop` (stop id or text), `length`, `cancelled` or `error`.
        error: why it failed, for `error`.
        ttft_s: seconds from arrival to the first token; None when there was none.
        tokens_per_s: rate of the tokens after the first.
        prefilled_tokens: prompt tokens computed for it.
        reused_tokens: prompt tokens found in the cache.
        recomputed_tokens: tokens computed again because it had been preempted.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    error: Exception | None = None
    ttft_s: float | None = None
    tokens_per_s: float = 0.0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step did for one request.

    Attributes:
        token_id: the new token; None where the request ended without one.
        text: text that became final, empty for a request that does not stream.
        output: the result, once the request has ended.
    """

    request_id: int
    token_id: int | None = None
    text: str = ""
    output: Output | None = None
