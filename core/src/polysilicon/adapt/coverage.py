"""Which causal LMs of the installed Transformers `adapt()` handles, measured on tiny models.

One architecture is judged by `judge()`, in a process of its own kind (see `isolation`): a tiny
random model is built, run, adapted and run again with the same weights.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers

from polysilicon.adapt import coverage_probes as probes
from polysilicon.adapt import isolation, tiny
from polysilicon.adapt.engine_check import engine_verdict
from polysilicon.adapt.report import REPLACEABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from polysilicon.adapt.report import Report

    _Notes = tuple[str, ...]

Status = Literal["adapted", "partly", "failed", "wrong"]
STATUSES: tuple[Status, ...] = ("adapted", "partly", "failed", "wrong")

ADAPT = "polysilicon.adapt:adapt"
#: Our bfloat16 error against float32, relative to Transformers' own.
BFLOAT16_BOUND = 2.0
#: Seconds before an architecture counts as hung; the slowest takes about five.
TIMEOUT = 60.0

#: What must not be kept for a model to count as fully adapted.
_COUNTED = REPLACEABLE | {"experts", "mixer"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The verdict on one architecture.

    Attributes:
        name: model type, as in `config.json`.
        status: `adapted`, `partly`, `failed` or `wrong`.
        kept: modules that stayed Transformers' own, one `kind: reason` for all layers alike.
        reason: why it failed or is wrong; empty otherwise.
        engine: `yes` when the paged engine gives the same greedy tokens, `no: ` and why otherwise.
        float32: largest difference of float32 logits, relative to the largest logit.
        bfloat16: our bfloat16 error divided by Transformers' own.
        notes: what Transformers' own model could not be asked (cached generation, bfloat16 …).
    """

    name: str
    status: Status
    kept: tuple[str, ...] = ()
    reason: str = ""
    engine: str = ""
    float32: float | None = None
    bfloat16: float | None = None
    notes: tuple[str, ...] = ()


class _Failed(Exception):
    """Ends the judging of one architecture; the text is the row's reason."""


def coverage(
    names: Sequence[str] = (),
    *,
    jobs: int | None = None,
    adapt: str = ADAPT,
    timeout: float = TIMEOUT,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Judges architectures, by default all of the installed Transformers, in own processes.

    Args:
        names: model types, e.g. `llama`.
        jobs: number of processes; one a core by default.
        adapt: lazy target of the function that adapts a model.
        timeout: seconds that one architecture may take.
        progress: called with each row as it comes.

    Raises:
        ValueError: a name is no model type with a causal-LM class.
    """
    known = tiny.names()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"no causal-LM architecture {', '.join(map(repr, unknown))} in the installed "
            f"Transformers: give model types such as 'llama', or none for all {len(known)}"
        )

    def lost(name: str, why: str) -> Row:
        return Row(name=name, status="failed", reason=f"our code or Transformers': {why}")

    rows = isolation.each(
        judge, names or known, arguments=(adapt,), jobs=jobs, timeout=timeout, lost=lost
    )
    found: dict[str, Row] = {}
    for row in rows:
        progress(row)
        found[row.name] = row
    return [found[name] for name in dict.fromkeys(names or known)]


def totals(rows: Iterable[Row]) -> dict[str, int]:
    """How many architectures have each status, and how many there are."""
    counts = Counter(row.status for row in rows)
    return {**{status: counts[status] for status in STATUSES}, "all": counts.total()}


def data(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as the object that `polysilicon coverage --json` prints."""
    return {
        "schema": 1,
        "architectures": [asdict(row) for row in rows],
        "totals": totals(rows),
    }


def judge(name: str, adapt: str = ADAPT) -> Row:
    """The verdict on one architecture; whatever it raises becomes the row's reason."""
    module, _, attribute = adapt.partition(":")
    adapter = getattr(importlib.import_module(module), attribute)
    with warnings.catch_warnings(), _quiet_transformers():
        warnings.simplefilter("ignore")
        try:
            return _judge(name, adapter)
        except _Failed as failure:
            return Row(name=name, status="failed", reason=str(failure))
        except Exception as error:
            reason = f"the comparison raised {type(error).__name__}: {error}"
            return Row(name=name, status="failed", reason=reason)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences what Transformers has to say about unusual configs: ours all are."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def _judge(name: str, adapter: Callable[..., Any]) -> Row:
    with _blame("could not be built from its config alone"):
        config = tiny.tiny_config(name)
        model = tiny.tiny_model(config, dtype=torch.float32)
    with _blame("Transformers' own model does not run on token ids alone"):
        probes.require_finite(probes.plain(model))
    expected, notes = probes.answers(model)
    reached = _reached(model)
    with _blame("our code raised: adapt()"):
        adapted = adapter(model)
    with _blame("our code raised: the adapted model"):
        ours = {name: probes.PROBES[name](model) for name in expected}
    float32, fence = probes.float32_difference(ours, expected, config)
    bfloat16, note = _bfloat16_ratio(config, expected, adapter)
    kept = _kept(adapted.report, reached)
    engine = engine_verdict(adapted, probes.token_ids(model, 2))
    return _verdict(name, kept, engine, float32, bfloat16, notes + fence + note)


def _verdict(
    name: str,
    kept: tuple[str, ...],
    engine: str,
    float32: float,
    bfloat16: float | None,
    notes: tuple[str, ...],
) -> Row:
    status: Status = "partly" if kept else "adapted"
    reason = ""
    # Written so that NaN is wrong too.
    if not float32 <= probes.FLOAT32_BOUND:
        status = "wrong"
        allowed = probes.FLOAT32_BOUND
        reason = f"float32 logits differ by {float32:.1e} of the largest, allowed {allowed}"
    elif bfloat16 is not None and not bfloat16 <= BFLOAT16_BOUND:
        status = "wrong"
        reason = f"bfloat16 error is {bfloat16:.2f} × Transformers' own, allowed {BFLOAT16_BOUND}"
    return Row(
        name=name,
        status=status,
        kept=kept,
        reason=reason,
        engine=engine,
        float32=float32,
        bfloat16=bfloat16,
        notes=notes,
    )


def _reached(model: PreTrainedModel) -> frozenset[str]:
    """Paths of the modules that run, or whose weights are used, when the model continues a text.

    The others, an image tower or a cross-attention without an encoder, are no part of the
    causal language model.
    """
    seen: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, path=path: seen.add(path))
        for path, module in model.named_modules()
    ]
    try:
        probes.plain(model)
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(seen) | _used(model)


def _used(model: PreTrainedModel) -> frozenset[str]:
    """Paths of the modules on whose own weights the logits depend."""
    try:
        with torch.enable_grad():
            ids = probes.token_ids(model)
            torch.autograd.backward(probes.forward_logits(model, input_ids=ids).sum())
    # A model with a backward of its own may refuse in eval mode: then all count as used.
    except Exception:
        return frozenset(path for path, _ in model.named_modules())
    used = {
        path
        for path, module in model.named_modules()
        if any(p.grad is not None for p in module.parameters(recurse=False))
    }
    model.zero_grad(set_to_none=True)
    return frozenset(used)


def _kept(report: Report, reached: frozenset[str]) -> tuple[str, ...]:
    """One line for all counted modules that stayed for one reason, layer numbers starred."""
    lines: dict[str, None] = {}
    for row in report.kept:
        if row.kind in _COUNTED and row.module in reached:
            path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.path)
            lines[f"{row.kind} {path}: {row.reason}"] = None
    return tuple(lines)


@contextmanager
def _blame(what: str) -> Iterator[None]:
    """Turns any exception of a third party's model, or of adapt(), into the row's reason."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        raise _Failed(f"{what}: {type(error).__name__}: {text[:300]}") from error


def _bfloat16_ratio(
    config: PreTrainedConfig,
    expected: dict[str, Tensor],
    adapter: Callable[..., Any],
) -> tuple[float | None, _Notes]:
    """Our bfloat16 error against float32 over Transformers' own; None where theirs doesn't run.

    Generated tokens may differ in bfloat16, so only whole sequences are compared.
    """
    asked = {name: probes.PROBES[name] for name in expected if name != "generate"}
    try:
        model = tiny.tiny_model(config, dtype=torch.bfloat16)
        theirs = {name: probe(model) for name, probe in asked.items()}
    except Exception as error:  # as in answers()
        return None, (f"no bfloat16: {type(error).__name__}: {str(error).strip()[:120]}",)
    with _blame("our code raised: adapt() in bfloat16"):
        adapter(model)
    with _blame("our code raised: the adapted model in bfloat16"):
        ours = {name: probe(model) for name, probe in asked.items()}
    return max(probes.error_ratio(ours[n], theirs[n], expected[n]) for n in asked), ()
