"""Whether the engine gives an adapted model's own tokens, for the coverage table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polysilicon.engine import Engine, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from polysilicon.adapt.adaptation import Adapted

_NEW_TOKENS = 4
_BLOCK = 4
#: Two best logits nearer than this, relative to the largest, may change places by rounding.
_TIE = 1e-4


def engine_verdict(
    adapted: Adapted,
    prompts: Tensor,  # [sequences, tokens]
) -> str:
    """`yes` when the paged engine's greedy tokens are the dense model's, otherwise why not.

    The prompts are prefilled in two chunks, so that the second reads what the first one stored.
    """
    if adapted.report.paged is not None:
        return f"no: {adapted.report.paged}"
    rows = [row.tolist() for row in prompts]
    total = prompts.shape[1] + _NEW_TOKENS
    try:
        engine = Engine(
            adapted,
            max_batch=len(rows),
            block_size=_BLOCK,
            num_blocks=len(rows) * (total // _BLOCK + 2),
            max_tokens_per_step=prompts.shape[1] // 2 + 1,
            compile=False,
        )
        outputs = engine.generate(rows, SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True))
    # Model code on packed prompts may raise anything; the row tells what.
    except Exception as error:
        return f"no: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for row, output in zip(rows, outputs, strict=True):
        if output.error is not None:
            return f"no: {type(output.error).__name__}: {output.error}"
        if not _is_greedy(adapted, row, output.token_ids):
            return "no: its tokens differ from the dense model's"
    return "yes"


@torch.no_grad()
def _is_greedy(adapted: Adapted, prompt: list[int], tokens: Sequence[int]) -> bool:
    """Whether each token is the dense model's most likely one after those before it."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = adapted.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(-1).values
    chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((best - chosen <= _TIE * logits.abs().max()).all())
