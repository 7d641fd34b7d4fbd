"""One short forward of the model, with every module call written down."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.adapt.probe import generator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from polysilicon.adapt.interface import AttentionCall

PROMPT = 9
PADDING = 3


@dataclass
class ModuleCall:
    """One call of one module; children that it called are listed in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    children: list[tuple[nn.Module, ModuleCall]] = field(default_factory=list)


#: Where a tensor lies and how: a view of a whole mask is that mask.
Place = tuple[int, torch.Size, tuple[int, ...]]

#: place of a mask → (the mask, kept so that its place stays its own; the function of (batch, head,
#: query, key) that built it)
Masks = dict[Place, tuple[Tensor, Callable[..., Any]]]


def place(tensor: Tensor) -> Place:
    """Where the tensor lies in memory, which tells it from all others alive."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@dataclass
class Recording:
    """What a model did with the probe prompt."""

    calls: dict[nn.Module, list[ModuleCall]] = field(default_factory=dict)
    attention: dict[nn.Module, list[AttentionCall]] = field(default_factory=dict)
    masks: Masks = field(default_factory=dict)
    failure: str = ""


def probe_ids(model: nn.Module, batch: int, length: int) -> Tensor:
    """Token ids that stand for plain text: low, and no special token of the config."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    special = {
        value
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    vocabulary = min(getattr(text, "vocab_size", 256), 256)
    plain = [i for i in range(vocabulary) if i not in special] or [0]
    picks = torch.randint(len(plain), (batch, length), generator=generator(1))
    device = next(model.parameters()).device
    return torch.tensor(plain)[picks].to(device)


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[dict[nn.Module, list[ModuleCall]]]:
    """Writes down every module call while the context is open."""
    calls: dict[nn.Module, list[ModuleCall]] = {}
    stack: list[tuple[nn.Module, ModuleCall]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entry = ModuleCall(args, dict(kwargs))
        if stack:
            stack[-1][1].children.append((module, entry))
        calls.setdefault(module, []).append(entry)
        stack.append((module, entry))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stack.pop()[1].output = output

    with ExitStack() as handles:
        for module in model.modules():
            pre = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            post = module.register_forward_hook(leave, with_kwargs=True)
            handles.callback(pre.remove)
            handles.callback(post.remove)
        yield calls


def _padded(model: nn.Module) -> list[Tensor]:
    """Left-padded prefill and one decode step with its cache; padding rows are left out."""
    ids = probe_ids(model, 2, PROMPT)
    keep = torch.ones_like(ids)
    # Nothing defines the results of padding tokens.
    keep[1, :PADDING] = 0
    first: Any = model(input_ids=ids, attention_mask=keep, use_cache=True)
    return [first.logits[0], first.logits[1, PADDING:], *_decode_step(model, first, keep)]


def _decode_step(model: nn.Module, first: Any, keep: Tensor) -> list[Tensor]:
    # Only real keys: Transformers answers old spellings too, with a warning.
    name = next((name for name in ("cache", "past_key_values") if name in list(first)), None)
    if name is None or first[name] is None:
        return []
    ids = probe_ids(model, 2, PROMPT + 1)[:, -1:]
    keep = torch.cat([keep, torch.ones_like(ids)], dim=1)
    step: Any = model(input_ids=ids, attention_mask=keep, use_cache=True, **{name: first[name]})
    return [step.logits[:, 0]]


def _plain(model: nn.Module) -> list[Tensor]:
    """One prompt without a cache."""
    alone: Any = model(input_ids=probe_ids(model, 1, PROMPT), use_cache=False)
    return [alone.logits[0]]


def _several(model: nn.Module) -> list[Tensor]:
    """Twelve prompts: models with codebooks take theirs as rows of the batch."""
    many: Any = model(input_ids=probe_ids(model, 12, PROMPT))
    return list(many.logits)


#: A way to run the probe prompts.
Scenario = Callable[["nn.Module"], list[Tensor]]


def runnable(model: nn.Module) -> tuple[list[Scenario], list[Tensor], str]:
    """The scenarios that the untouched model can run, and their logits; else why it can't."""
    found: list[Scenario] = []
    expected: list[Tensor] = []
    failure = ""
    for scenario in (_padded, _plain, _several):
        if scenario is _several and found:
            break
        try:
            logits = scenario(model)
        # Models that need more than token ids raise all sorts.
        except Exception as error:
            failure = failure or f"{type(error).__name__}: {error}"
        else:
            found.append(scenario)
            expected += logits
    return found, expected, failure


def run_probe(model: nn.Module, scenarios: list[Scenario]) -> list[Tensor]:
    """The logits of every scenario."""
    return [logits for scenario in scenarios for logits in scenario(model)]


def record(model: nn.Module, scenarios: list[Scenario]) -> Recording:
    """Writes down the module calls of the scenarios."""
    recording = Recording()
    with recorded_calls(model) as calls:
        run_probe(model, scenarios)
    recording.calls = calls
    return recording
