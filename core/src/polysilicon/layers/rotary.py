"""Rotary position embedding: angles of positions, for every scaling that models use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from polysilicon.layers.base import Layer, dtype_name
from polysilicon.layers.rotary_scaling import RotaryFrequencies
from polysilicon.ops import rotary_cos_sin
from polysilicon.records import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

Output = Literal["half", "duplicated", "repeated"]


class RotaryEmbedding(Layer):
    """(cos, sin) of positions, in the form in which the model's attention expects them.

    Frequencies that depend on the sequence length (dynamic NTK, LongRoPE) are chosen from the
    largest position of the call by tensor operations, so that one compiled graph serves all
    lengths. A call of several sequences therefore shares one choice, as in Transformers.

    Args:
        frequencies: from `rotary_scaling.frequencies(…)`, or a plain float [r/2] tensor.
        scaling: factor of cos and sin; None for the frequencies' own (1 for a plain tensor).
        output: `half` [..., r/2]; `duplicated` [..., r] as two equal halves (NeoX pairs);
            `repeated` [..., r] with each number twice in a row (interleaved pairs).
        sections: frequencies of each position axis, for multi-section models; positions are then
            [axes, batch, tokens], or [batch, tokens] where all axes agree.
        sections_interleaved: whether the axes alternate instead of lying in chunks.
        dtype: of the model, for choosing the kernel; results have the dtype of `x`.

    Raises:
        ValueError: an unknown output form, or sections that do not cover the frequencies.
    """

    inv_freq: Tensor
    dtype_mark: Tensor
    long_inv_freq: Tensor | None

    rotary_cos_sin: Callable[..., Any]

    def __init__(
        self,
        frequencies: RotaryFrequencies | Tensor,
        scaling: float | None = None,
        *,
        output: Output = "duplicated",
        sections: Sequence[int] = (),
        sections_interleaved: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if output not in ("half", "duplicated", "repeated"):
            raise ValueError(
                f"RotaryEmbedding: output is {output!r}, expected half, duplicated or repeated"
            )
        if isinstance(frequencies, Tensor):
            frequencies = RotaryFrequencies(inv_freq=frequencies)
        if frequencies.inv_freq.dim() != 1:
            raise ValueError(
                f"RotaryEmbedding: frequencies have shape {tuple(frequencies.inv_freq.shape)}, "
                "expected one dimension"
            )
        if sections:
            count = frequencies.inv_freq.shape[0]
            rotary_cos_sin.section_axes(count, sections, sections_interleaved)
        self.scaling = frequencies.scaling if scaling is None else float(scaling)
        self.output = output
        self.sections = list(sections)
        self.sections_interleaved = sections_interleaved
        self.dynamic = frequencies.dynamic
        self.long_after = frequencies.long_after
        self._keep("inv_freq", frequencies.inv_freq.float())
        long = frequencies.long_inv_freq
        self._keep("long_inv_freq", None if long is None else long.float())
        self._keep("dtype_mark", torch.empty(0, dtype=dtype))
        self.bind_kernel("rotary_cos_sin", rotary_cos_sin.torch_kernel)

    def _keep(self, name: str, value: Tensor | None) -> None:
        # Not persistent: the frequencies follow from the config and are in no checkpoint.
        self.register_buffer(name, value, persistent=False)

    def problems(self) -> dict[str, Problem]:
        facts: dict[str, str | int | float | bool | None] = {
            "rotary": 2 * self.inv_freq.shape[0],
            "scaling": self.scaling,
            "sections": ",".join(map(str, self.sections)),
            "sections_interleaved": self.sections_interleaved,
        }
        dtype = dtype_name(self.dtype_mark.dtype)
        return {"rotary_cos_sin": Problem(op="rotary_cos_sin", dtype=dtype, facts=facts)}

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [batch, tokens] → cos, sin [batch, tokens, r or r/2] in the dtype of `x`."""
        if self.sections and position_ids.dim() == 2:
            position_ids = position_ids.expand(len(self.sections), -1, -1)
        cos, sin = self.rotary_cos_sin(
            position_ids,
            self._frequencies_for(position_ids),
            self.scaling,
            x.dtype,
            self.sections,
            self.sections_interleaved,
        )
        if self.output == "duplicated":
            return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        if self.output == "repeated":
            return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        return cos, sin

    def _frequencies_for(self, position_ids: Tensor) -> Tensor:
        if not position_ids.numel():
            return self.inv_freq
        if self.dynamic is not None:
            return self.dynamic.inv_freq(position_ids.max() + 1)
        if self.long_inv_freq is not None:
            is_long = position_ids.max() >= self.long_after
            return torch.where(is_long, self.long_inv_freq, self.inv_freq)
        return self.inv_freq

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Angles need float32 frequencies whatever dtype the model is moved to.
        kept = {name: getattr(self, name) for name in ("inv_freq", "long_inv_freq")}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            if value is not None:
                setattr(self, name, value.to(self.dtype_mark.device))
        return self

    def extra_repr(self) -> str:
        return f"{2 * self.inv_freq.shape[0]}, scaling={self.scaling:g}, output={self.output}"
