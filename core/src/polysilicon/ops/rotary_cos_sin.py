"""rotary_cos_sin: the angles of rotary position embedding (Su et al., arXiv:2104.09864).

Multi-section positions (Qwen2-VL, arXiv:2409.12191) give each frequency one of several position
axes (time, height, width). `sections` counts the frequencies of each axis; they lie in chunks, or
interleaved (axis 1 at 1, 4, 7 …, axis 2 at 2, 5, 8 …, the rest axis 0) as in Qwen3-VL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def section_axes(count: int, sections: Sequence[int], interleaved: bool) -> list[int]:
    """The position axis of each of `count` frequencies.

    Raises:
        ValueError: the sections do not cover the frequencies.
    """
    if sum(sections) != count and not interleaved:
        raise ValueError(
            f"rotary sections {tuple(sections)} sum to {sum(sections)}, but there are {count} "
            "frequencies: they must be equal"
        )
    axes = [0] * count
    for axis, length in enumerate(sections):
        if interleaved:
            step = len(sections)
            places = range(axis, min(count, length * step), step) if axis else range(0)
        else:
            start = sum(sections[:axis])
            places = range(start, start + length)
        for place in places:
            axes[place] = axis
    return axes


def reference(
    positions: Tensor,
    inv_freq: Tensor,
    scaling: float,
    dtype: torch.dtype,
    sections: Sequence[int] = (),
    sections_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """scaling · cos and sin of position · frequency in float64.

    The product itself is rounded to float32 as models define it: at position 100,000 its rounding
    is visible, and the trained weights have seen it.
    """
    if sections:
        axes = section_axes(inv_freq.shape[-1], sections, sections_interleaved)
        columns = [positions[axis].float() * inv_freq[i] for i, axis in enumerate(axes)]
        angle = torch.stack(columns, dim=-1).double()
    else:
        angle = (positions.float().unsqueeze(-1) * inv_freq).double()
    return angle.cos() * scaling, angle.sin() * scaling


def torch_kernel(
    positions: Tensor,  # int64 [...], or [axes, ...] with sections
    inv_freq: Tensor,  # float32 [rotary / 2]
    scaling: float,
    dtype: torch.dtype,
    sections: Sequence[int] = (),
    sections_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [..., rotary / 2] in `dtype`, times `scaling`."""
    angle = positions.float().unsqueeze(-1) * inv_freq
    if sections:
        axes = section_axes(inv_freq.shape[-1], sections, sections_interleaved)
        angle = torch.stack([angle[axis, ..., i] for i, axis in enumerate(axes)], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def frequencies(count: int) -> Tensor:
        return (10000.0 ** -(torch.arange(count) / count)).to(device)

    for count in (1, 16, 31, 128):
        for tokens in (0, 1, 7, 17):
            kwargs = {
                "positions": source.integers(4096, tokens),
                "inv_freq": frequencies(count),
                "scaling": 1.0 if count % 2 else 1.19,
                "dtype": dtype,
            }
            yield Sample(name=f"tokens {tokens} frequencies {count}", kwargs=kwargs)
    far = source.integers(1 << 20, 2, 5)
    base = {"inv_freq": frequencies(32), "scaling": 1.0, "dtype": dtype}
    yield Sample(name="positions to 2^20", kwargs={**base, "positions": far})
    expanded = source.integers(64, 1, 9).expand(4, 9)
    yield Sample(name="expanded", kwargs={**base, "positions": expanded})
    axes = source.integers(512, 3, 2, 5)
    for interleaved, sections in ((False, (8, 12, 12)), (True, (12, 10, 10)), (True, (11, 11, 10))):
        kwargs = {**base, "positions": axes, "sections": sections}
        kwargs["sections_interleaved"] = interleaved
        yield Sample(name=f"sections {sections} interleaved {interleaved}", kwargs=kwargs)


OP = Op(
    name="rotary_cos_sin",
    schema=(
        "(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype,"
        " int[] sections=[], bool sections_interleaved=False) -> (Tensor, Tensor)"
    ),
    keys=frozenset({"rotary", "scaling", "sections", "sections_interleaved"}),
    reference=reference,
    samples=_samples,
    tokens=torch.numel,
    results=("input", "input"),
    source="https://arxiv.org/abs/2104.09864",
)
