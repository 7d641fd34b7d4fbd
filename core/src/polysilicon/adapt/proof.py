"""The last word: the whole adapted model against the whole original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polysilicon.adapt.probe import Unverified, generator
from polysilicon.adapt.recording import PROMPT, probe_ids, run_probe
from polysilicon.layers.attention import PagedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from polysilicon.adapt.recording import Scenario
    from polysilicon.adapt.work import Work

_BLOCK = 4

_EXACT = (torch.float32, torch.float64)

#: Runs of the nudged model: which picks change is chance.
_NUDGES = 2


def model_bound(dtype: torch.dtype, layers: int) -> float:
    """Allowed difference of logits, as `logits_error` measures it.

    In float32 the project's own limit; rounding of shorter dtypes adds up over the layers like a
    random walk, some ten roundings a layer.
    """
    if dtype in _EXACT:
        return 1e-4
    return float(4 * torch.finfo(dtype).eps * (10 * layers) ** 0.5)


def sensitivity(
    model: nn.Module, scenarios: list[Scenario], expected: list[Tensor], dtype: torch.dtype
) -> float:
    """How far the untouched model's logits move when its embeddings move by one rounding.

    In short dtypes a router or a sparse index picks other experts or keys at the smallest change;
    a replacement cannot be asked to differ by less.
    """
    find: Any = getattr(model, "get_input_embeddings", None)
    table: nn.Module | None = find() if find is not None else None
    if table is None or dtype in _EXACT:
        return 0.0
    source = generator(2)

    def nudge(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=source).to(output)
        return output * (1 + torch.finfo(dtype).eps * noise)

    handle = table.register_forward_hook(nudge)
    try:
        return max(
            logits_error(expected, run_probe(model, scenarios), dtype) for _ in range(_NUDGES)
        )
    finally:
        handle.remove()


def logits_error(theirs: list[Tensor], ours: list[Tensor], dtype: torch.dtype) -> float:
    """Difference of two lists of logits: the largest relative to the largest of theirs.

    In short dtypes it is the error of a typical token, because single tokens for which a router
    or a sparse index picks otherwise are no fault, and would hide one that moves all tokens.
    """
    if [a.shape for a in theirs] != [b.shape for b in ours]:
        raise Unverified("the logits have other shapes")
    worst = 0.0
    for a, b in zip(theirs, ours, strict=True):
        same = torch.equal(torch.isfinite(a), torch.isfinite(b))
        a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
        if not same:
            raise Unverified("the logits overflow in different places")
        if dtype in _EXACT:
            largest = float(a.abs().max()) or 1.0
            worst = max(worst, float((a - b).abs().max()) / largest)
        else:
            worst = max(worst, _typical_error(a, b, torch.finfo(dtype).eps))
    return worst


def _typical_error(theirs: Tensor, ours: Tensor, least: float) -> float:
    """Geometric mean over tokens of the root mean square error, relative to all of theirs."""
    scale = theirs.square().mean().sqrt().clamp(min=1e-30)
    errors = (ours - theirs).square().mean(-1).sqrt() / scale
    return float(errors.clamp(min=least / 16).log().mean().exp())


def check_model(
    model: nn.Module,
    scenarios: list[Scenario],
    expected: list[Tensor],
    dtype: torch.dtype,
    bound: float,
) -> str:
    """Why the adapted model's logits are not the original's; empty if they are."""
    try:
        error = logits_error(expected, run_probe(model, scenarios), dtype)
    except Unverified as reason:
        return f"the model's logits differ: {reason}"
    # Model code that our modules stand in may raise anything.
    except Exception as error_:
        return f"the model raised {type(error_).__name__}: {error_}"
    if not error <= bound:
        return f"the model's logits differ by {error:.1e}, allowed {bound:.1e}"
    return ""


def check_paged(work: Work, bound: float) -> str:
    """Why the engine cannot run the model; empty if packed prompts give each prompt's logits.

    Two prompts lie end to end in one row, as the engine lays them, first all but their last
    tokens, then those. Anything that mixes tokens other than by our attention and our states
    (a convolution, a recurrence, a bias by distance) shows here.
    """
    model, context = work.model, work.context
    ids = probe_ids(model, 2, PROMPT)
    lengths = (PROMPT, PROMPT - 4)
    rows = [ids[i : i + 1, :length] for i, length in enumerate(lengths)]
    blocks = [-(-length // _BLOCK) for length in lengths]
    try:
        alone = [model(input_ids=row, use_cache=False).logits[0] for row in rows]
        for layer in work.attention.values():
            layer.allocate_cache(sum(blocks) + 1, _BLOCK, device=ids.device)
        for state in work.recurrent.values():
            # What another sequence left there: a row that begins must not read it.
            state.allocate_states(len(rows) + 1, device=ids.device, fill=torch.nan)
        paged: list[list[Tensor]] = [[] for _ in rows]
        for begin, end in ((0, -1), (-1, None)):
            pieces = [row[0, begin:end] for row in rows]
            starts = [len(row[0]) - 1 if begin else 0 for row in rows]
            for kept, logits in zip(paged, _packed(work, pieces, starts, blocks), strict=True):
                kept.append(logits)
        error = logits_error(alone, [torch.cat(parts) for parts in paged], work.dtype)
    except Unverified as reason:
        return str(reason)
    # Model code on packed prompts may raise anything.
    except Exception as error_:
        return f"packed prompts raised {type(error_).__name__}: {error_}"
    finally:
        context.batch = None
        for layer in work.attention.values():
            layer.detach_cache()
        for state in work.recurrent.values():
            state.detach_state()
    return "" if error <= bound else f"packed prompts give other logits (by {error:.1e})"


def _packed(
    work: Work, pieces: list[Tensor], starts: list[int], blocks: list[int]
) -> Sequence[Tensor]:
    """Logits of each piece, which begins at its own position, in one step of the engine."""
    device, lengths = pieces[0].device, [len(piece) for piece in pieces]
    work.context.batch = _batch(lengths, starts, blocks, device)
    where = zip(starts, lengths, strict=True)
    positions = torch.cat([torch.arange(start, start + n) for start, n in where]).to(device)
    logits: Tensor = work.model(
        input_ids=torch.cat(pieces)[None], position_ids=positions[None], use_cache=False
    ).logits[0]
    return torch.split(logits, lengths)


def _batch(
    lengths: list[int], begins: list[int], blocks: list[int], device: torch.device
) -> PagedBatch:
    """Block 0 and state 0 stay unused, so that a table that was not read shows."""
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    slots, start = [], 1
    for row, (length, begin, count) in enumerate(zip(lengths, begins, blocks, strict=True)):
        tables[row, :count] = torch.arange(start, start + count)
        slots.append(torch.arange(begin, begin + length) + start * _BLOCK)
        start += count
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    return PagedBatch(
        slots=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        query_starts=starts.to(device),
        kv_lengths=torch.tensor(ends, dtype=torch.int32, device=device),
        max_query=max(lengths),
        max_kv=max(ends),
        state_slots=torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device),
    )
