"""Dense attention: queries against keys that the caller keeps (Transformers' own caches).

b batch, h query heads, hk key heads (divides h), tq and tk lengths, d and dv head sizes.
Query i stands at position `tk - tq + i`: the last query sees the last key.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from polysilicon.records import Problem

#: Facts that both attention ops share.
KEYS = frozenset(
    {"heads", "kv_heads", "head_size", "v_head_size", "window", "softcap", "sinks", "causal"}
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def reference(
    q: Tensor,  # [b, h, tq, d]
    k: Tensor,  # [b, hk, tk, d]
    v: Tensor,  # [b, hk, tk, dv]
    mask: Tensor | None,  # broadcastable to [b, h, tq, tk]; bool: True may be seen; float: added
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,  # [h]
) -> tuple[Tensor, Tensor]:  # [b, tq, h, dv], [b, tq, h]
    """The definition in float64, one query position at a time."""
    (batch, heads, rows, _), columns = q.shape, k.shape[2]
    out = torch.zeros(batch, rows, heads, v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full((batch, rows, heads), -math.inf, dtype=torch.float64, device=q.device)
    keys, values = (x.double().repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    full = None if mask is None else mask.expand(batch, heads, rows, columns)
    for i in range(rows):
        position = columns - rows + i
        scores = (keys * q[:, :, i, None].double()).sum(-1) * scale  # [b, h, tk]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        for j in range(columns):
            if (causal and j > position) or (window and abs(position - j) >= window):
                scores[:, :, j] = -math.inf
        if full is not None and full.dtype == torch.bool:
            scores[~full[:, :, i]] = -math.inf
        elif full is not None:
            scores = scores + full[:, :, i].double()
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().expand(batch, heads)[..., None]), -1)
        lse[:, i] = torch.logsumexp(scores, -1)
        weights = torch.softmax(scores, -1)[..., :columns]
        weights[lse[:, i] == -math.inf] = 0.0
        out[:, i] = (weights[..., None] * values).sum(2)
    return out, lse


def torch_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention by PyTorch's fused CPU kernel where it can express the problem, else by matmuls."""
    rows, columns = q.shape[2], k.shape[2]
    # A single query at the end sees every key, and the fused kernel knows the square triangle:
    # neither needs a mask in memory.
    triangle = causal and rows > 1
    fused_triangle = triangle and rows == columns and mask is None and not window
    bias = mask
    if (triangle and not fused_triangle) or window:
        visible = visibility(columns - rows, rows, columns, causal, window, q.device)
        bias = visible if mask is None else _both(mask, visible)
    out, lse = attend(q, k, v, bias, scale, fused_triangle, softcap)
    if bias is not None:
        lse = lse.masked_fill(_blind_rows(bias), -math.inf)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


def visibility(
    first: int,  # position of the first query, the first key being 0
    rows: int,
    columns: int,
    causal: bool,
    window: int,
    device: torch.device,
) -> Tensor:  # bool [rows, columns]
    """Which keys each query may see by its position."""
    position = torch.arange(rows, device=device)[:, None] + first
    distance = position - torch.arange(columns, device=device)
    if not causal:
        return distance.abs() < window
    seen = distance >= 0
    return seen & (distance < window) if window else seen


def _both(mask: Tensor, visible: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, -math.inf)


def attend(
    q: Tensor,  # [b, h, tq, d]
    k: Tensor,  # [b, hk, tk, d]
    v: Tensor,  # [b, hk, tk, dv]
    mask: Tensor | None,  # bool or additive, broadcastable to [b, h, tq, tk]
    scale: float,
    triangle: bool,  # query i sees keys 0..i
    softcap: float,
) -> tuple[Tensor, Tensor]:  # [b, h, tq, dv], float32 [b, h, tq]
    """Attention without sinks; rows that the mask blinds give zeros and any log-sum-exp."""
    # The fused kernel divides by the number of rows: empty calls end the process.
    filled = q.shape[2] > 0 and k.shape[2] > 0
    if q.device.type != "cpu" or softcap or k.shape[3] != v.shape[3] or not filled:
        return _attend_by_matmuls(q, k, v, mask, scale, triangle, softcap)
    # It also reads the numbers of a head as neighbours, whatever their stride.
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    bias = None if mask is None else _additive(mask, q.dtype)
    out, lse = _flash(q, k, v, 0.0, triangle, attn_mask=bias, scale=scale)
    return out, lse


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add to the scores."""
    # The fused kernel takes 2 or 4 dims.
    mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    if mask.dtype == torch.float32 and dtype.itemsize < 4:
        # A bias by distance has large numbers that differ by little: it is not rounded.
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _blind_rows(mask: Tensor) -> Tensor:
    """True for the rows of a mask that let nothing through: the fused kernel says 0 for them."""
    if mask.dtype == torch.bool:
        return ~mask.any(-1)
    return (mask == -math.inf).all(-1)


def _attend_by_matmuls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    triangle: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    (batch, heads, rows, size), (_, kv_heads, columns, _) = q.shape, k.shape
    # Heads that share keys become rows of one product: no key is repeated in memory.
    shared = heads // kv_heads * rows
    grouped = q.reshape(batch, kv_heads, shared, size).float()
    scores = torch.matmul(grouped, k.float().transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, heads, rows, columns)
    if triangle:
        mask = visibility(0, rows, rows, True, 0, q.device)
    if mask is not None:
        scores = scores + _additive(mask, torch.float32)
    lse = torch.logsumexp(scores, -1)
    # A row that sees nothing has only -inf: zero weights instead of 0/0.
    weights = torch.softmax(scores, -1).masked_fill((lse == -math.inf)[..., None], 0.0)
    out = torch.matmul(weights.view(batch, kv_heads, shared, columns), v.float())
    return out.view(batch, heads, rows, v.shape[3]).to(q.dtype), lse


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one logit a head that takes weight and gives no value; heads are lse's last dim."""
    sink = sinks.float()
    share = torch.sigmoid(lse - sink)
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink.expand_as(lse))


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    def make(
        name: str,
        b: int = 1,
        h: int = 4,
        hk: int = 2,
        tq: int = 7,
        tk: int = 7,
        d: int = 16,
        dv: int | None = None,
        sinks: bool = False,
        mask: Tensor | None = None,
        **settings: Any,
    ) -> Sample:
        rng = torch.Generator().manual_seed(sum(map(ord, name)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(device, dtype)

        values: dict[str, Any] = {
            "q": normal(b, h, tq, d),
            "k": normal(b, hk, tk, d),
            "v": normal(b, hk, tk, d if dv is None else dv),
            "mask": None if mask is None else mask.to(device),
            "scale": d**-0.5,
            "causal": True,
            "window": 0,
            "softcap": 0.0,
            "sinks": normal(h) if sinks else None,
        }
        return Sample(name=name, kwargs=values | settings)

    yield make("prefill_gqa")
    yield make("prefill_mha", h=3, hk=3, tq=13, tk=13)
    yield make("prefill_mqa_head_80", h=5, hk=1, d=80)
    yield make("decode", b=3, tq=1, tk=33)
    yield make("chunk_after_context", tq=5, tk=31, d=96)
    yield make("no_queries", tq=0, tk=4)
    yield make("no_keys", tq=2, tk=0)
    yield make("one_of_each", h=1, hk=1, tq=1, tk=1)
    yield make("one_more_than_a_tile", tq=17, tk=33)
    yield make("bidirectional", tq=5, tk=9, causal=False)
    yield make("bidirectional_window", tq=9, tk=9, causal=False, window=3)
    yield make("window_1", window=1)
    yield make("window_3_after_context", tq=6, tk=17, window=3)
    yield make("window_wider_than_context", window=100)
    yield make("decode_window", tq=1, tk=40, window=8)
    yield make("softcap", softcap=2.0, scale=1.0)
    yield make("sinks", sinks=True)
    yield make("softcap_sinks_window", softcap=5.0, sinks=True, window=4, tq=9, tk=12)
    yield make("value_head_smaller", dv=8)
    yield make("value_head_larger_odd", dv=17, d=24)
    yield make("scale_not_from_head", scale=0.75)
    left = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    left[1, :, :, :3] = False
    yield make("left_padding_blind_rows", b=2, mask=left, causal=False)
    yield make("blind_rows_sinks", b=2, mask=left, causal=False, sinks=True)
    yield make("blind_rows_softcap", b=2, mask=left, causal=False, softcap=3.0)
    yield make("bool_mask_and_causal", b=2, mask=left[:, :, -1:], window=4)
    slope = -torch.arange(7.0).flip(0).expand(1, 4, 7, 7) * torch.rand(1, 4, 1, 1).mul_(0).add_(0.5)
    yield make("float_mask_like_alibi", mask=slope.to(dtype))
    # So far from zero that a short dtype would round the differences away.
    far = torch.arange(7.0) * 1.24 - (160.0 if dtype.itemsize < 4 else 0.0)
    yield make("float32_mask_far_from_zero", mask=far.expand(1, 4, 7, 7))
    lowest = torch.zeros(2, 1, 7, 7).masked_fill(~left, torch.finfo(dtype).min)
    yield make("float_mask_lowest_number", b=2, mask=lowest.to(dtype), causal=False)
    yield make("float_mask_blind", b=2, mask=lowest.masked_fill(~left, -math.inf).to(dtype))


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return max(int(kwargs["q"].shape[3]), int(kwargs["k"].shape[2]))


def _problem_call(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A call with a problem's shapes: one token decodes, more are a prompt."""

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    heads, head_size = size("heads", 8), size("head_size", 64)
    kv_heads, columns = size("kv_heads", heads), 1000 if tokens == 1 else tokens
    source = Source(dtype, device)
    return {
        "q": source.normal(1, heads, tokens, head_size),
        "k": source.normal(1, kv_heads, columns, head_size),
        "v": source.normal(1, kv_heads, columns, size("v_head_size", head_size)),
        "mask": None,
        "scale": head_size**-0.5,
        "causal": bool(problem.fact("causal", True)),
        "window": size("window", 0),
        # The problem says whether there is a softcap, not which: Gemma 2's.
        "softcap": 50.0 if problem.fact("softcap") else 0.0,
        "sinks": source.normal(heads) if problem.fact("sinks") else None,
    }


def _tokens(q: Tensor) -> int:
    return q.shape[0] * q.shape[2]


OP = Op(
    name="attention",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int window, "
        "float softcap, Tensor? sinks) -> (Tensor, Tensor)"
    ),
    keys=KEYS,
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    tokens=_tokens,
    inputs=_problem_call,
    results=("input", "float32"),
    contiguous=False,
    source="https://arxiv.org/abs/1706.03762; softcap https://arxiv.org/abs/2408.00118; "
    "sinks https://arxiv.org/abs/2508.10925",
)
