"""Greedy tokens of real models equal Transformers' generate on the same float32 weights.

A difference counts as equal only where Transformers' two best logits are closer than 1e-4: there
the order of a sum decides. How often that happened is printed at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import polysilicon
from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import LoadError
from polysilicon.loading import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polysilicon.adapt import Adapted
    from polysilicon.engine import Output
    from polysilicon.loading import Loaded

NEW = 64
TIE = 1e-4
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
STORY = (
    "The lighthouse keeper had counted every ship that passed the cape for forty years, and wrote "
    "each of them into a book with a blue cover. "
)
PROMPTS = (
    "Why is the sky blue?",
    "Hi",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name the planets of the solar system, from the sun outwards.",
    STORY + "One night a ship came that had no name. What did he write?",
    STORY + "On the last page there was room for one more line. What was it?",
    "Translate to French: the weather is fine today, and we are going to the sea.",
    STORY * 3 + "Summarise this in one sentence.",
)


def _encode(loaded: Loaded, text: str) -> list[int]:
    """The text as a user's turn where the model has a template, else as it is."""
    if not loaded.chat_template:
        ids: list[int] = loaded.tokenizer(text)["input_ids"]
        return ids
    turn = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return list(loaded.tokenizer(turn, add_special_tokens=False)["input_ids"])


class Real:
    """A model, its prompts, and what Transformers answers to each alone."""

    def __init__(self, name: str) -> None:
        loaded = load(name, dtype="float32", progress=False)
        self.name, self.ties, self.compared = name, 0, 0
        self.prompts = [_encode(loaded, text) for text in PROMPTS]
        self.expected, self.gaps = self._reference(loaded.model)
        self.adapted: Adapted = polysilicon.adapt(loaded.model)

    def _reference(self, model: Any) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens, and the distance between the two best logits of each."""
        config = model.generation_config
        config.eos_token_id, config.do_sample = None, False
        config.top_k = config.top_p = config.temperature = None
        tokens, gaps = [], []
        for prompt in self.prompts:
            result = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens.append(result.sequences[0, len(prompt) :].tolist())
            best = torch.cat(result.logits).topk(2).values
            gaps.append((best[:, 0] - best[:, 1]).tolist())
        return tokens, gaps

    def check(self, outputs: list[Output]) -> None:
        rows = zip(outputs, self.expected, self.gaps, strict=True)
        for number, (output, expected, gaps) in enumerate(rows):
            assert output.error is None
            got = list(output.token_ids)
            self.compared += NEW
            if got == expected:
                continue
            first = next(i for i in range(NEW) if got[i] != expected[i])
            assert gaps[first] < TIE, f"token {first} of prompt {number} differs"
            self.ties += 1

    def engine(self, **options: Any) -> Engine:
        return Engine(self.adapted, **({"compile": False, "num_blocks": 256} | options))


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    try:
        made = Real(request.param)
    except LoadError as error:
        pytest.skip(f"the model cannot be loaded: {error}")
    yield made
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\n{made.name}: {made.compared} tokens compared, {made.ties} sequences parted at two "
            f"logits closer than {TIE}"
        )


def test_one_at_a_time(real: Real) -> None:
    real.check(real.engine(max_batch=1, prefix_sharing=False).generate(real.prompts, GREEDY))


def test_batched_by_8(real: Real) -> None:
    engine = real.engine(prefix_sharing=False)
    real.check(engine.generate(real.prompts, GREEDY))
    report = engine.report()
    assert (report.reused_tokens, report.preemptions) == (0, 0)


def test_chunked_prefill(real: Real) -> None:
    engine = real.engine(max_tokens_per_step=24, prefix_sharing=False)
    real.check(engine.generate(real.prompts, GREEDY))


def test_prefix_sharing(real: Real) -> None:
    engine = real.engine(prefix_sharing=True)
    real.check(engine.generate(real.prompts, GREEDY))
    real.check(engine.generate(real.prompts, GREEDY))
    total = sum(map(len, real.prompts))
    assert engine.report().reused_tokens > total // 2


def test_preemption(real: Real) -> None:
    longest = max(map(len, real.prompts)) + NEW
    engine = real.engine(num_blocks=-(-longest // 16) + 4, prefix_sharing=False)
    real.check(engine.generate(real.prompts, GREEDY))
    assert engine.report().preemptions > 2


def test_a_second_turn_computes_only_the_new_tokens(real: Real) -> None:
    engine = real.engine()
    (first,) = engine.generate(real.prompts[:1], GREEDY)
    turn = [*real.prompts[0], *first.token_ids, *real.prompts[1]]
    (second,) = engine.generate([turn], SamplingParams(max_new_tokens=4, ignore_eos=True))
    # One more than is new: the last token of the first turn was sampled, but never computed.
    assert second.prefilled_tokens == len(real.prompts[1]) + 1
    (alone,) = real.engine(prefix_sharing=False).generate(
        [turn], SamplingParams(max_new_tokens=4, ignore_eos=True)
    )
    assert second.token_ids == alone.token_ids
