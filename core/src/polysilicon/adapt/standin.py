"""The base of layers that answer for the functions of Transformers' recurrent mixers.

A mixer keeps its own forward; the functions of its file that convolve, scan or correct become
these. Each is known by the names of its arguments and proved by running both.

In the engine a mixer has no cache, so it takes the forms for prompts, whose layers hold the
engine's states; outside, states are Transformers' cache, passed in and given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from polysilicon.errors import AdaptError
from polysilicon.layers.base import Layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from polysilicon.layers.attention import PagedContext
    from polysilicon.layers.recurrent import Recurrent
    from polysilicon.records import Problem

#: Arguments that say where packed sequences begin, which these functions of Transformers refuse.
_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class StandIn(Layer):
    """One function in Transformers' convention over a recurrent layer of ours.

    Args:
        layer: what computes.
    """

    #: Names of the function's arguments, in order.
    takes: ClassVar[tuple[str, ...]]
    #: Whether the engine runs this form: that for prompts, which needs no cache.
    paged: ClassVar[bool]
    #: Dim of the tokens in the arguments of a form for prompts.
    token_dim: ClassVar[int] = 1
    layer: Recurrent

    def __init__(self, layer: Recurrent) -> None:
        super().__init__()
        self.layer = layer

    @classmethod
    def build(
        cls, given: Mapping[str, Any], dtype: torch.dtype, name: str, context: PagedContext | None
    ) -> StandIn:
        """The stand-in that the arguments of a call ask for.

        Raises:
            Unverified: they are of a kind that our layer does not take.
        """
        raise NotImplementedError  # each states its own

    def problems(self) -> dict[str, Problem]:
        """None of its own."""
        return {}


def refuse_packed(kwargs: Mapping[str, Any]) -> None:
    for name in _PACKED:
        if kwargs.get(name) is not None:
            raise AdaptError(
                f"an adapted mixer was given {name!r}, by which several sequences share a row: "
                "give each sequence a row of its own, or call undo() first"
            )
