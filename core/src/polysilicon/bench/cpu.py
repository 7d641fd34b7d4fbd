"""`polysilicon bench cpu`: our engine and Transformers on the same weights, in one run.

Both sides are warmed up, then take turns, so that a machine that slows down slows both. Figures
are medians over the rounds, ratios are medians of the ratios within each round.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from polysilicon.bench.cpu_sides import Ours, Side, Transformers, Work
from polysilicon.bench.memory import read_gb_s, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    Samples = dict[str, list[float]]

#: Requests at once, on both sides.
BATCH = 8
_BLOCK = 16
_SEED = 20_26


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much work is measured."""

    rounds: int = 5
    mixed_rounds: int = 3
    decode_prompt: int = 32
    decode_tokens: int = 64
    prefill_tokens: int = 512
    requests: int = 32
    prompts: tuple[int, int] = (16, 256)
    outputs: tuple[int, int] = (16, 128)


#: Enough to see that everything runs; its figures mean nothing.
QUICK = Plan(
    rounds=1,
    mixed_rounds=1,
    decode_tokens=8,
    prefill_tokens=64,
    requests=9,
    prompts=(4, 24),
    outputs=(2, 8),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured, by side (`theirs`, `theirs_compiled`, `ours`, `ours_compiled`).

    Attributes:
        decode_tokens_s: tokens/s of one request after its first token.
        prefill_s: seconds from a long prompt to its first token.
        mixed_tokens_s: wanted tokens/s of requests of mixed lengths.
        ratios: ours ÷ theirs as speed; above 1 ours is faster.
        memory_gb_s: measured read bandwidth.
        weight_bytes: what one decoded token reads at least.
        setup: model, machine, versions, plan.
    """

    decode_tokens_s: Mapping[str, float]
    prefill_s: Mapping[str, float]
    mixed_tokens_s: Mapping[str, float]
    ratios: Mapping[str, float]
    memory_gb_s: float
    weight_bytes: int
    setup: Mapping[str, Any] = field(default_factory=dict)

    def memory_fraction(self, side: str) -> float:
        """Share of the measured bandwidth that a side's decode reaches."""
        return self.weight_bytes * self.decode_tokens_s[side] / 1e9 / self.memory_gb_s

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON of `polysilicon bench cpu` (docs/json.md)."""
        data: dict[str, Any] = {"schema": 1}
        data |= {name: round(value, 3) for name, value in self.ratios.items()}
        data["memory_gb_s"] = round(self.memory_gb_s, 2)
        data["weight_bytes"] = self.weight_bytes
        figures = {
            "decode_tokens_s": self.decode_tokens_s,
            "prefill_s": self.prefill_s,
            "mixed_tokens_s": self.mixed_tokens_s,
            "memory_fraction": {side: self.memory_fraction(side) for side in self.decode_tokens_s},
        }
        for name, by_side in figures.items():
            data[name] = {side: round(value, 4) for side, value in by_side.items()}
        return data | {"setup": dict(self.setup)}

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        plan = self.setup["plan"]
        shown = Table("", "ours", "Transformers", "ours ÷ theirs", title=self._title())
        for title, name, ours, theirs in (
            ("decode, 1 request, eager", "decode_batch1_ratio", "ours", "theirs"),
            ("decode, 1 request, compiled", "compiled_decode_ratio", *_COMPILED),
        ):
            if name in self.ratios:
                row = (self._decode(ours), self._decode(theirs))
                shown.add_row(title, *row, f"{self.ratios[name]:.2f}")
        prefill = (f"{self.prefill_s[side] * 1000:.0f} ms" for side in ("ours", "theirs"))
        title = f"prefill of {plan['prefill_tokens']} tokens"
        shown.add_row(title, *prefill, f"{self.ratios['prefill_ratio']:.2f}")
        mixed = (f"{self.mixed_tokens_s[side]:.1f} tokens/s" for side in ("ours", "theirs"))
        title = f"{plan['requests']} requests, mixed lengths, {BATCH} at once"
        shown.add_row(title, *mixed, f"{self.ratios['mixed_ratio']:.2f}")
        memory = (
            f"memory: {self.memory_gb_s:.1f} GB/s read; a token reads "
            f"{self.weight_bytes / 1e9:.3f} GB of weights"
        )
        others = self.setup["others_cpu_share"]
        if others <= _QUIET:
            return Group(shown, memory)
        noise = f"other processes used {others:.0%} of the processor meanwhile: measure again alone"
        return Group(shown, memory, f"[yellow]warning:[/] {noise}")

    def _decode(self, side: str) -> str:
        rate = self.decode_tokens_s[side]
        return f"{rate:.1f} tokens/s ({self.memory_fraction(side):.0%} of memory)"

    def _title(self) -> str:
        setup = self.setup
        versions = f"torch {setup['torch']}, transformers {setup['transformers']}"
        return f"{setup['model']} {setup['dtype']}, {setup['threads']} threads, {versions}"


_COMPILED = ("ours_compiled", "theirs_compiled")

#: A share of the processor that a desktop or a CI agent may take.
_QUIET = 0.05


def measure(
    model: str = "smollm2",
    *,
    plan: Plan | None = None,
    compiled: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Runs the comparison.

    Args:
        model: what `load()` takes; every side gets its own copy of the same float32 weights.
        plan: how much work.
        compiled: also measure both sides compiled (compiling takes a minute or more).
        say: told what happens, as it happens.
    """
    plan = plan or Plan()
    others = OtherProcesses()
    memory = read_gb_s()
    sides, vocabulary, read = _sides(model, plan, compiled, say)
    random_ids = random.Random(_SEED)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(random_ids.randrange(vocabulary) for _ in range(length))

    say("warming up")
    for side in sides.values():
        side.decode(Work(prompt=prompt(plan.decode_prompt), wanted=plan.decode_tokens))
    eager = {name: side for name, side in sides.items() if name not in _COMPILED}
    for side in eager.values():
        side.prefill(prompt(plan.prefill_tokens))
    say("decode")
    decode = _rounds(
        sides,
        plan.rounds,
        [Work(prompt=prompt(plan.decode_prompt), wanted=plan.decode_tokens)] * plan.rounds,
        lambda side, work: side.decode(work),
    )
    say("prefill")
    prompts = [prompt(plan.prefill_tokens) for _ in range(plan.rounds)]
    prefill = _rounds(eager, plan.rounds, prompts, lambda side, ids: side.prefill(ids))
    say("requests of mixed lengths")
    works = [
        Work(
            prompt=prompt(random_ids.randint(*plan.prompts)),
            wanted=random_ids.randint(*plan.outputs),
        )
        for _ in range(plan.requests)
    ]
    mixed = _rounds(eager, plan.mixed_rounds, [works] * plan.mixed_rounds, lambda s, w: s.serve(w))
    wanted = sum(work.wanted for work in works)
    ratios = {
        "decode_batch1_ratio": _ratio(decode, "ours", "theirs"),
        "mixed_ratio": _ratio(mixed, "ours", "theirs"),
        "prefill_ratio": _ratio(prefill, "ours", "theirs"),
    }
    if compiled:
        ratios["compiled_decode_ratio"] = _ratio(decode, *_COMPILED)
        ratios["eager_to_their_compiled_decode_ratio"] = _ratio(decode, "ours", "theirs_compiled")
    tokens = plan.decode_tokens - 1
    return Result(
        decode_tokens_s={name: tokens / statistics.median(t) for name, t in decode.items()},
        prefill_s={name: statistics.median(t) for name, t in prefill.items()},
        mixed_tokens_s={name: wanted / statistics.median(t) for name, t in mixed.items()},
        ratios=ratios,
        # Measured twice, as the better one is nearer to what the memory can do.
        memory_gb_s=max(memory, read_gb_s()),
        weight_bytes=read,
        setup=_setup(model, plan) | {"others_cpu_share": round(others.share(), 3)},
    )


def _sides(
    model: str, plan: Plan, compiled: bool, say: Callable[[str], None]
) -> tuple[dict[str, Side], int, int]:
    """Every side with its own copy of the weights, the vocabulary, and the bytes of the weights."""
    from polysilicon.loading import load

    sides: dict[str, Side] = {}
    vocabulary = read = 0
    for form in ("", "_compiled") if compiled else ("",):
        say(f"loading{form.replace('_', ', ')}")
        theirs = load(model, progress=False).model
        vocabulary = theirs.config.get_text_config().vocab_size
        read = weight_bytes(theirs)
        sides[f"theirs{form}"] = Transformers(theirs, compiled=bool(form), batch=BATCH)
        sides[f"ours{form}"] = _engine(load(model, progress=False).model, plan, bool(form))
    return sides, vocabulary, read


def _engine(model: Any, plan: Plan, compiled: bool) -> Side:
    """Our side: ids in and out as on theirs, and nothing answered from the cache of a repeat."""
    from polysilicon.engine import Engine

    # Compiled, only decode is measured: one request, and no graph for longer steps than its prompt.
    batch, step = (1, plan.decode_prompt) if compiled else (BATCH, max(512, plan.prefill_tokens))
    longest = max(
        plan.decode_prompt + plan.decode_tokens,
        plan.prefill_tokens + 1,
        plan.prompts[1] + plan.outputs[1],
    )
    engine = Engine(
        model,
        max_batch=batch,
        max_tokens_per_step=step,
        num_blocks=batch * -(-longest // _BLOCK),
        block_size=_BLOCK,
        compile=compiled,
        prefix_sharing=False,
    )
    return Ours(engine)


def _rounds(
    sides: Mapping[str, Side],
    rounds: int,
    work: Sequence[Any],
    run: Callable[[Side, Any], float],
) -> Samples:
    """Seconds by side and round; who begins changes every round."""
    seconds: Samples = {name: [] for name in sides}
    for index in range(rounds):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            seconds[name].append(run(sides[name], work[index]))
    return seconds


def _ratio(seconds: Samples, ours: str, theirs: str) -> float:
    pairs = zip(seconds[ours], seconds[theirs], strict=True)
    return statistics.median(their / our for our, their in pairs)


class OtherProcesses:
    """How much of the processor others used since this object was made."""

    def __init__(self) -> None:
        self._began = self._seconds()

    def share(self) -> float:
        """Between 0 and 1; what a virtual machine's host took away counts too."""
        used, own, idle = (
            now - then for now, then in zip(self._seconds(), self._began, strict=True)
        )
        return min(1.0, max(0.0, (used - own) / max(used + idle, 1e-9)))

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guests are counted within user already.
        spare = idle + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return sum(times) - spare, own.user + own.system, idle


def _setup(model: str, plan: Plan) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": "float32",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("polysilicon", "torch", "transformers")},
        "plan": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
    }


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
