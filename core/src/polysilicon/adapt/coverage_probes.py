"""What the coverage run asks of a model, and how two models' answers are compared."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

import torch

from polysilicon.adapt import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    Probe = Callable[[PreTrainedModel], Tensor]

#: Largest difference of float32 logits from Transformers', relative to the largest logit.
FLOAT32_BOUND = 1e-4
#: Longer than three windows of `tiny.WINDOW`, so that whole blocks of keys fall out of them.
TOKENS = 27
PADDED = 7
#: Enough tokens that chance in bfloat16 averages out.
SEQUENCES = 12
NEW_TOKENS = 3
#: Runs of a nudged model, and the size of the nudge: a few float32 roundings.
_NUDGES = 8
_NUDGE = 4 * torch.finfo(torch.float32).eps
#: Share of the tokens that may be left out because they are on the fence.
_FENCE_SHARE = 0.05


def token_ids(model: PreTrainedModel, sequences: int = SEQUENCES) -> Tensor:
    """Token ids of sequences, none of them special; the same in every call."""
    rows = sequences * tiny.ROWS_PER_SEQUENCE.get(model.config.model_type, 1)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(tiny.FIRST_PLAIN_ID, tiny.VOCAB, (rows, TOKENS), generator=generator)


def forward_logits(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    """Logits in float32 of one forward without a cache, with the inputs that the model knows."""
    accepted = inspect.signature(model.forward).parameters
    optional = {"use_cache": False, "position_ids": inputs.pop("position_ids", None)}
    given = {k: v for k, v in optional.items() if k in accepted and v is not None}
    logits: Tensor = model(**inputs, **given).logits
    return logits.float()


@torch.no_grad()
def plain(model: PreTrainedModel) -> Tensor:
    """Logits of whole sequences without a mask."""
    return forward_logits(model, input_ids=token_ids(model))


@torch.no_grad()
def padded(model: PreTrainedModel) -> Tensor:
    """Logits at the real tokens of sequences of which half are padded on the left."""
    ids = token_ids(model)
    mask = _left_padding(ids)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = forward_logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    return logits.reshape(*mask.shape, -1)[mask.bool()]


@torch.no_grad()
def generated(model: PreTrainedModel) -> Tensor:
    """Logits of a few greedy steps through `generate()` and the model's own cache."""
    ids = token_ids(model, 2)
    result = model.generate(
        ids,
        attention_mask=_left_padding(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(result.logits)


PROBES: dict[str, Probe] = {"plain": plain, "padded": padded, "generate": generated}


def _left_padding(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[ids.shape[0] // 2 :, :PADDED] = 0
    return mask


def answers(model: PreTrainedModel) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """What Transformers' own model answers to the probes, and notes on those that it can't."""
    found, notes = {}, []
    for name, probe in PROBES.items():
        try:
            found[name] = require_finite(probe(model))
        except Exception as error:  # what a third party's model can't do is not ours to judge
            notes.append(f"no {name} probe: {type(error).__name__}: {str(error).strip()[:120]}")
    return found, tuple(notes)


def require_finite(logits: Tensor) -> Tensor:
    """The logits again.

    Raises:
        ValueError: some are infinite or NaN.
    """
    if not torch.isfinite(logits).all():
        raise ValueError("logits are not finite")
    return logits


def float32_difference(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], config: PreTrainedConfig
) -> tuple[float, tuple[str, ...]]:
    """Largest difference of logits relative to the largest, and notes on tokens left out.

    A token on the fence, where Transformers' own model too jumps to other logits when its weights
    move by a few roundings (a router, a sparse index), is left out, if such tokens are few.
    """
    worst, notes = 0.0, []
    for name, expected in theirs.items():
        moved = _moved(ours[name], expected)
        error = moved.max().item()
        # Written so that NaN counts as beyond the bound.
        if not error <= FLOAT32_BOUND:
            fence = _on_the_fence(config, PROBES[name], expected)
            if 0 < fence.float().mean() <= _FENCE_SHARE:
                error = moved[~fence].max().item()
                notes.append(f"{name} probe: {int(fence.sum())} tokens on the fence left out")
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst, tuple(notes)


def _moved(ours: Tensor, theirs: Tensor) -> Tensor:
    """By token, the largest difference relative to the largest logit of all."""
    return (ours - theirs).abs().amax(-1) / theirs.abs().max()


@torch.no_grad()
def _on_the_fence(config: PreTrainedConfig, probe: Probe, expected: Tensor) -> Tensor:
    """By token, whether Transformers' own logits jump when the weights are nudged."""
    fence = torch.zeros(expected.shape[:-1], dtype=torch.bool)
    generator = torch.Generator().manual_seed(2)
    for _ in range(_NUDGES):
        model = tiny.tiny_model(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.mul_(1 + _NUDGE * torch.randn(weight.shape, generator=generator))
        fence |= _moved(probe(model), expected) > FLOAT32_BOUND
    return fence


def error_ratio(ours: Tensor, theirs: Tensor, exact: Tensor) -> float:
    """Our error over theirs, as geometric means of the tokens' root mean square errors.

    Geometric, because a router on the fence picks another expert for single tokens of ours or of
    theirs: an error forty times the usual one, that a sum or a maximum would show alone.
    """
    if not torch.isfinite(ours).all():
        return math.inf
    # A model that computes in float32 throughout has no error to be twice of.
    least = torch.finfo(torch.bfloat16).eps / 16 * exact.square().mean().sqrt()
    errors = [(x - exact).square().mean(-1).sqrt().clamp(min=least) for x in (ours, theirs)]
    return (errors[0].log().mean() - errors[1].log().mean()).exp().item()
