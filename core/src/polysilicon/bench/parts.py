"""Parts of models that are more than products: mixers and experts, Transformers' own beside ours.

Each part is taken whole, projections and routers included, out of a one-layer model of real sizes
with random weights, once as Transformers runs it and once adapted, and both get the same hidden
states. Of Transformers' several ways to run experts the fastest counts.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.table import Table

#: Tokens of a prompt, and sequences of a decode step.
PROMPT, STEP = 512, 8


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of part.

    Attributes:
        name: what the table calls it.
        model: `model_type` of the model that it is taken from.
        path: the part in that model.
        sizes: config fields.
        experts: whether it routes tokens to experts; it carries a state else.
    """

    name: str
    model: str
    path: str
    sizes: Mapping[str, Any]
    experts: bool = False


_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}

PARTS: tuple[Part, ...] = (
    Part(
        name="Mamba-2 mixer, 48 heads of 64, state 128",
        model="mamba2",
        path="backbone.layers.0.mixer",
        sizes={"hidden_size": 1536, "num_heads": 48, "head_dim": 64, "n_groups": 1},
    ),
    Part(
        name="gated delta rule, 32 heads of 128",
        model="qwen3_next",
        path="model.layers.0.linear_attn",
        sizes={
            **_HEADS,
            "hidden_size": 2048,
            "intermediate_size": 64,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention"],
        },
    ),
    Part(
        name="Mamba mixer, 3072 channels, state 16",
        model="mamba",
        path="backbone.layers.0.mixer",
        sizes={"hidden_size": 1536, "intermediate_size": 3072},
    ),
    Part(
        name="short convolution, 2048 channels",
        model="lfm2",
        path="model.layers.0.conv",
        sizes={**_HEADS, "hidden_size": 2048, "intermediate_size": 64, "layer_types": ["conv"]},
    ),
    Part(
        name="32 experts of 256, 8 a token",
        model="qwen3_moe",
        path="model.layers.0.mlp",
        sizes={
            **_HEADS,
            "hidden_size": 1024,
            "intermediate_size": 64,
            "moe_intermediate_size": 256,
            "num_experts": 32,
            "num_experts_per_tok": 8,
        },
        experts=True,
    ),
    Part(
        name="8 experts of 1024, 2 a token",
        model="mixtral",
        path="model.layers.0.mlp",
        sizes={**_HEADS, "hidden_size": 1024, "intermediate_size": 1024},
        experts=True,
    ),
    Part(
        name="16 experts of 512 with biases and clamps, 4 a token",
        model="gpt_oss",
        path="model.layers.0.mlp",
        sizes={
            **_HEADS,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "layer_types": ["full_attention"],
        },
        experts=True,
    ),
)

#: Ways in which Transformers runs experts.
_WAYS = ("eager", "batched_mm", "grouped_mm")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one part at one load; `ratio` is the median of theirs ÷ ours within a round."""

    part: str
    load: str
    theirs_s: float
    ours_s: float
    ratio: float
    theirs: str = ""

    def as_dict(self) -> dict[str, Any]:
        """One entry of `parts` in the documented JSON (docs/json.md)."""
        data: dict[str, Any] = {"part": self.part, "load": self.load, "theirs": self.theirs}
        seconds = {"theirs_s": self.theirs_s, "ours_s": self.ours_s}
        data |= {name: round(value, 7) for name, value in seconds.items()}
        return data | {"ratio": round(self.ratio, 3)}


def measure_parts(
    parts: tuple[Part, ...] | None = None,
    *,
    rounds: int = 11,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Runs every part at every load.

    Args:
        parts: which; None for all of `PARTS`.
        rounds: how often each side runs, after one run that is not counted.
        say: told what happens, as it happens.
    """
    rows: list[Row] = []
    for part in PARTS if parts is None else parts:
        say(part.name)
        theirs, ours = _pair(part)
        loads = _expert_loads if part.experts else _mixer_loads
        with torch.inference_mode():
            for load, sides in loads(part, theirs, ours):
                rows.append(_row(part, load, sides, rounds))
    return rows


def _pair(part: Part) -> tuple[Any, Any]:
    """The model as Transformers runs it and, with the same weights, adapted and prepared."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from polysilicon.adapt import adapt
    from polysilicon.errors import KernelError
    from polysilicon.prepare import prepare

    known = AutoConfig.for_model(part.model)
    config = type(known)(**{**_SMALL, **part.sizes})
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ours = copy.deepcopy(theirs)
    kept = adapt(ours).report.kept
    if kept:
        raise KernelError(
            f"{part.name}: {kept[0].path} of {part.model} stayed Transformers' own "
            f"({kept[0].reason}), so there is nothing to compare: run `polysilicon coverage "
            f"{part.model}`"
        )
    prepare(ours)
    return theirs, ours


#: Side → what it runs.
Sides = dict[str, "Callable[[], Any]"]


def _expert_loads(part: Part, theirs: Any, ours: Any) -> Iterator[tuple[str, Sides]]:
    hidden = theirs.config.hidden_size
    ways: dict[str, nn.Module] = {}
    for way in _WAYS:
        ways[way] = _with_experts_run_by(theirs, way).get_submodule(part.path)
    for tokens in (1, STEP, PROMPT):
        x = _normal(1, tokens, hidden)
        sides: Sides = {way: _call(module, x) for way, module in ways.items()}
        yield f"{tokens} tokens", {**sides, "ours": _call(ours.get_submodule(part.path), x)}


def _with_experts_run_by(model: Any, way: str) -> Any:
    """The model over the same weights with its experts run in one of Transformers' ways."""
    shared = {id(p): p for p in model.parameters()}
    twin = copy.deepcopy(model, dict(shared))
    twin.set_experts_implementation(way)
    return twin


def _mixer_loads(part: Part, theirs: Any, ours: Any) -> Iterator[tuple[str, Sides]]:
    hidden = theirs.config.hidden_size
    pair = {"theirs": theirs, "ours": ours}
    prompt = _normal(1, PROMPT, hidden)
    yield (
        f"prompt of {PROMPT}",
        {side: _call(model.get_submodule(part.path), prompt) for side, model in pair.items()},
    )
    step = _normal(STEP, 1, hidden)
    yield f"a step of {STEP}", {side: _step(model, part, step) for side, model in pair.items()}


def _step(model: Any, part: Part, x: Tensor) -> Callable[[], Any]:
    """One token of every sequence, after a short prompt whose states a cache holds."""
    from transformers import DynamicCache

    module = model.get_submodule(part.path)
    cache = DynamicCache(config=model.config)
    takes = inspect.signature(type(module).forward).parameters
    # The newer name first: Transformers 5.24 answers the older ones too, with a warning.
    name = next(key for key in ("cache", "cache_params", "past_key_values") if key in takes)
    module(x.expand(-1, 4, -1).contiguous(), **{name: cache})
    return lambda: module(x, **{name: cache})


def _call(module: nn.Module, x: Tensor) -> Callable[[], Any]:
    return lambda: module(x)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _row(part: Part, load: str, sides: Sides, rounds: int) -> Row:
    """Sides take turns; who begins changes every round."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds + 1):
        for side in list(sides)[:: 1 if index % 2 == 0 else -1]:
            began = time.perf_counter()
            sides[side]()
            seconds[side].append(time.perf_counter() - began)
    medians = {side: statistics.median(times[1:]) for side, times in seconds.items()}
    best = min((side for side in sides if side != "ours"), key=lambda side: medians[side])
    pairs = zip(seconds["ours"][1:], seconds[best][1:], strict=True)
    return Row(
        part=part.name,
        load=load,
        theirs_s=medians[best],
        ours_s=medians["ours"],
        ratio=statistics.median(their / our for our, their in pairs),
        theirs="" if best == "theirs" else best,
    )


def table_of(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    from rich.table import Table

    shown = Table("part", "load", "ours", "Transformers", "ours ÷ theirs", title="Parts, float32")
    for row in rows:
        theirs = f"{row.theirs_s * 1000:.2f} ms{f' ({row.theirs})' if row.theirs else ''}"
        ours = f"{row.ours_s * 1000:.2f} ms"
        shown.add_row(row.part, row.load, ours, theirs, f"{row.ratio:.2f}")
    return shown
