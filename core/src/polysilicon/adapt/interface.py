"""One attention implementation per adapted model, registered with Transformers under its own name.

Transformers looks up attention and mask functions by `config._attn_implementation`. Registering a
new name changes nothing for other models; only configs that carry the name reach these functions.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polysilicon.adapt.recording import Masks, place
from polysilicon.errors import AdaptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from polysilicon.layers.attention import PagedContext

#: Child of an attention module that holds our Attention layer.
CHILD = "polysilicon_attention"

#: Implementations whose masks and arguments we know.
KNOWN = ("sdpa", "eager")

_numbers = itertools.count(1)


@dataclass
class AttentionCall:
    """One call of the attention interface as the model made it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]


@dataclass
class Recorder:
    """What passes through the interface during a recorded forward."""

    original: Callable[[nn.Module], Callable[..., Any]]
    calls: dict[nn.Module, list[AttentionCall]] = field(default_factory=dict)
    masks: Masks = field(default_factory=dict)

    def run(self, module: nn.Module, seen: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Notes the call and answers it as before."""
        self.calls.setdefault(module, []).append(seen)
        result: tuple[Tensor, Tensor | None] = self.original(module)(
            module, seen.query, seen.key, seen.value, seen.mask, **seen.kwargs
        )
        return result


class Interface:
    """The registered pair of functions of one model; records first, then runs our layers.

    The name stays registered for the life of the process: a deep copy of the model may carry it
    after undo() of the first.
    """

    def __init__(self, context: PagedContext) -> None:
        self.name = f"polysilicon-{next(_numbers)}"
        self.context = context
        self.mask_implementation = "sdpa"
        #: Whether a mask is made where Transformers would leave it to the kernel to be causal:
        #: layers that get fewer queries than keys can't tell which queries those are.
        self.always_masks = False
        self.recorder: Recorder | None = None
        ALL_ATTENTION_FUNCTIONS.register(self.name, self._attention_function())
        ALL_MASK_ATTENTION_FUNCTIONS.register(self.name, self._mask_function())

    def _attention_function(self) -> Callable[..., Any]:
        def attention(
            module: nn.Module,
            query: Tensor,  # [b, h, tq, d]
            key: Tensor,  # [b, hk, tk, d]
            value: Tensor,
            attention_mask: Tensor | None,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            if self.recorder is not None:
                seen = AttentionCall(query, key, value, attention_mask, dict(kwargs))
                return self.recorder.run(module, seen)
            layer = module._modules.get(CHILD)
            if layer is None:
                # Another model that was built from the same config object, and not adapted.
                original = original_function(module, self.mask_implementation)
                theirs: tuple[Tensor, Tensor | None] = original(
                    module, query, key, value, attention_mask, **kwargs
                )
                return theirs
            refuse_training(module)
            refuse_weights(kwargs)
            return run_layer(layer, query, key, value, attention_mask), None

        return attention

    def _mask_function(self) -> Callable[..., Any]:
        def mask(*args: Any, **kwargs: Any) -> Any:
            # In the engine the block tables say what a token may see.
            if self.context.batch is not None:
                return None
            build = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[self.mask_implementation]
            if self.recorder is None and not self.always_masks:
                return build(*args, **kwargs)
            kwargs["allow_is_causal_skip"] = False
            kwargs["allow_is_bidirectional_skip"] = False
            if self.recorder is None:
                return build(*args, **kwargs)
            built = build(*args, **kwargs)
            self.recorder.masks[place(built)] = (built, kwargs["mask_function"])
            return built

        return mask


def run_layer(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Our layer on Transformers' terms: without a mask, causal means aligned to the first key."""
    queries = query.shape[2]
    if mask is None and layer.causal and 1 < queries < key.shape[2]:
        # An empty static cache: the keys past the queries are not written yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
    out: Tensor = layer(query, key, value, mask)
    return out


def refuse_training(module: nn.Module) -> None:
    """Our layers know no dropout: training would silently be another model's."""
    if module.training:
        raise AdaptError(
            "the adapted model is in training mode, but our layers are for inference: call "
            "model.eval(), or undo() before training"
        )


#: Tensors that Transformers passes along and that change nothing in self-attention.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "labels"}
    | {"logits_to_keep", "token_type_ids", "input_ids"}
)


def refuse_tensors(kwargs: dict[str, Any]) -> None:
    """Arguments that the proof has not seen (another sequence's states, a bias, a head mask)."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in _HARMLESS:
            raise AdaptError(
                f"the adapted attention was given {name!r}, which it was not proved for: call "
                "undo() to use the model with it"
            )


def refuse_weights(kwargs: dict[str, Any]) -> None:
    """Attention weights are never materialised by our kernels."""
    if kwargs.get("output_attentions"):
        raise AdaptError(
            "output_attentions=True was asked of an adapted model, whose attention kernels never "
            "hold the weights: call undo() first, or run the model without adapt()"
        )


def original_function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The function that `module` called before: a registered one, or eager of its own file."""
    if implementation in ALL_ATTENTION_FUNCTIONS._global_mapping:
        registered: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS._global_mapping[implementation]
        return registered
    names = vars(sys.modules[type(module).__module__])
    eager = [name for name in names if name.endswith("eager_attention_forward")]
    if len(eager) != 1:
        raise AdaptError(
            f"the eager attention function of {type(module).__name__} cannot be told: "
            f"found {eager or 'none'}"
        )
    function: Callable[..., Any] = names[eager[0]]
    return function
