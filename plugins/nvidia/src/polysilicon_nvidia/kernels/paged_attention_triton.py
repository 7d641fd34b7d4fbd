# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Parameters of Triton's functions can't be annotated: an annotation is a type of its language.
"""The programs of paged attention in Triton's language; `paged_attention.py` launches them.

Softmax is kept in base 2; sums are float32. Addresses are 64-bit, whatever the cache's strides.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))


# Counts change from call to call: no code of its own for those that are 1 or a multiple of 16.
@triton.jit(
    do_not_specialize=["tokens", "sequences", "tiles", "table_row"],
    do_not_specialize_on_alignment=["lse", "block_tables", "query_starts", "kv_lengths", "sinks"],
)
def attend(
    out,  # [T, h, dv], or float32 [splits, T, h, dv]
    lse,  # float32 [T, h] in base e, or [splits, T, h] in base 2
    q,
    k_cache,
    v_cache,
    block_tables,
    query_starts,
    kv_lengths,
    sinks,
    factor,
    cap,
    window,
    tokens,
    sequences,
    tiles,
    kv_heads,
    q_token,
    q_head,
    q_element,
    k_block,
    k_slot,
    k_head,
    k_element,
    v_block,
    v_slot,
    v_head,
    v_element,
    table_row,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    # The last tiles see the most keys: they start first.
    tile = tiles - 1 - tl.program_id(0) // kv_heads
    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows % GROUP
    row_tokens = rows // GROUP
    values = tl.arange(0, BLOCK_V)
    if tile < 0:
        blank(out, lse, query_starts, heads, row_tokens, values, tokens, sequences, kv_heads,
              GROUP, VALUE, TILE_TOKENS)  # fmt: skip
        return

    if ONE_TILE:
        sequence = tile
        first = tl.load(query_starts + sequence)
    else:
        sequence = sequence_of(tile, query_starts, sequences, TILE_TOKENS)
        start = tl.load(query_starts + sequence)
        first = start + (tile - start // TILE_TOKENS - sequence) * TILE_TOKENS
    end = tl.load(query_starts + sequence + 1)
    if first >= end:
        return
    length = tl.load(kv_lengths + sequence)
    row_tokens += first
    live = (rows < TILE_TOKENS * GROUP) & (row_tokens < end)
    # A sequence's last query stands at its last cached position.
    positions = length - end + row_tokens
    lowest = length - end + first
    highest = length - end + tl.minimum(first + TILE_TOKENS, end) - 1

    low = 0
    high = length
    if CAUSAL:
        high = highest + 1
    if WINDOWED:
        low = tl.maximum(lowest - window + 1, 0)
        high = tl.minimum(high, highest + window)
    begin = low // KEYS
    stop = tl.cdiv(high, KEYS)
    if SPLIT:
        share = tl.cdiv(stop - begin, tl.num_programs(1))
        begin += tl.program_id(1) * share
        stop = tl.minimum(stop, begin + share)
    # Blocks of keys below `whole` are seen in full by every row.
    whole = begin
    if not WINDOWED:
        whole = high // KEYS
        if CAUSAL:
            whole = (lowest + 1) // KEYS
    whole = tl.minimum(tl.maximum(whole, begin), stop)

    elements = tl.arange(0, BLOCK_D)
    q_at = row_tokens.to(tl.int64) * q_token + heads * q_head
    q_mask = live[:, None]
    if SIZE < BLOCK_D:
        q_mask = q_mask & (elements < SIZE)[None, :]
    queries = tl.load(
        q + q_at[:, None] + (elements.to(tl.int64) * q_element)[None, :], mask=q_mask, other=0.0
    )
    table = block_tables + sequence.to(tl.int64) * table_row
    k_cache += kv_head * k_head
    v_cache += kv_head * v_head

    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS and not SPLIT:
        peak = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    for block in tl.range(begin, whole):
        acc, peak, total = step(
            acc, peak, total, queries, k_cache, v_cache, table, block, positions, low, high,
            factor, cap, window, k_block, k_slot, k_element, v_block, v_slot, v_element,
            SIZE, VALUE, BLOCK_SIZE, KEYS, BLOCK_D, BLOCK_V, CAUSAL, WINDOWED, SOFTCAP, False,
        )  # fmt: skip
    # A block or two where nothing is windowed: not worth a deep pipeline.
    for block in tl.range(whole, stop, num_stages=None if WINDOWED else 2):
        acc, peak, total = step(
            acc, peak, total, queries, k_cache, v_cache, table, block, positions, low, high,
            factor, cap, window, k_block, k_slot, k_element, v_block, v_slot, v_element,
            SIZE, VALUE, BLOCK_SIZE, KEYS, BLOCK_D, BLOCK_V, CAUSAL, WINDOWED, SOFTCAP, True,
        )  # fmt: skip

    # A split may hold no key that a row sees: it weighs nothing.
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    peak = tl.where(seen, peak + tl.log2(total), -float("inf"))
    acc = acc / total[:, None]
    at = row_tokens.to(tl.int64) * (kv_heads * GROUP) + heads
    if SPLIT:
        at += tl.program_id(1).to(tl.int64) * tokens * (kv_heads * GROUP)
    else:
        peak *= LN2
    tl.store(lse + at, peak, mask=live)
    mask = live[:, None]
    if VALUE < BLOCK_V:
        mask = mask & (values < VALUE)[None, :]
    tl.store(out + at[:, None] * VALUE + values[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def step(
    acc,
    peak,
    total,
    queries,
    k_cache,
    v_cache,
    table,
    block,
    positions,
    low,
    high,
    factor,
    cap,
    window,
    k_block,
    k_slot,
    k_element,
    v_block,
    v_slot,
    v_element,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One block of keys: scores, the running peak and sum of the softmax, and the values."""
    keys = block * KEYS + tl.arange(0, KEYS)
    elements = tl.arange(0, BLOCK_D)
    values = tl.arange(0, BLOCK_V)
    slots = (keys % BLOCK_SIZE).to(tl.int64)
    if MASKED:
        # What no row sees is never read: it may never have been stored.
        inside = (keys >= low) & (keys < high)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        inside = keys >= 0
        blocks = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
    k_at = k_cache + (blocks * k_block + slots * k_slot)[None, :]
    k_at += (elements.to(tl.int64) * k_element)[:, None]
    k = gather(k_at, inside[None, :], (elements < SIZE)[:, None], MASKED, SIZE < BLOCK_D)
    scores = tl.dot(queries, k, input_precision="ieee") * factor
    if SOFTCAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if MASKED:
        ahead = keys[None, :] - positions[:, None]
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (ahead <= 0)
        if WINDOWED:
            visible = visible & (ahead < window) & (ahead > -window)
        scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = new_peak
    if MASKED:
        # A row that has seen nothing yet has no peak to subtract.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    v_at = v_cache + (blocks * v_block + slots * v_slot)[:, None]
    v_at += (values.to(tl.int64) * v_element)[None, :]
    v = gather(v_at, inside[:, None], (values < VALUE)[None, :], MASKED, VALUE < BLOCK_V)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def gather(pointers, inside, within, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A block of the cache, zero where the mask of the keys or of the padded head says so."""
    if MASKED and PADDED:
        block = tl.load(pointers, mask=inside & within, other=0.0)
    elif MASKED:
        block = tl.load(pointers, mask=inside, other=0.0)
    elif PADDED:
        block = tl.load(pointers, mask=within, other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def sequence_of(tile, query_starts, sequences, TILE_TOKENS: tl.constexpr):
    """The sequence that a tile is numbered for: the last whose first tile is not above it."""
    low = tile * 0
    high = sequences + low
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TILE_TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def blank(
    out,
    lse,
    query_starts,
    heads,
    row_tokens,
    values,
    tokens,
    sequences,
    kv_heads,
    GROUP: tl.constexpr,
    VALUE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """The padding after the last sequence: zeros that nothing was summed for."""
    for first in tl.range(tl.load(query_starts + sequences), tokens, TILE_TOKENS):
        rows = first + row_tokens
        live = (row_tokens < TILE_TOKENS) & (rows < tokens)
        at = rows.to(tl.int64) * (kv_heads * GROUP) + heads
        tl.store(lse + at, -float("inf"), mask=live)
        mask = live[:, None] & (values < VALUE)[None, :]
        nothing = tl.zeros(mask.shape, out.dtype.element_ty)
        tl.store(out + at[:, None] * VALUE + values[None, :], nothing, mask=mask)


@triton.jit(
    do_not_specialize=["tokens", "sequences", "splits"],
    do_not_specialize_on_alignment=["lse", "part_lse", "query_starts", "sinks"],
)
def combine(
    out,  # [T, h, dv]
    lse,  # float32 [T, h]
    part_out,  # float32 [splits, T, h, dv]
    part_lse,  # float32 [splits, T, h], base 2
    query_starts,
    sinks,
    tokens,
    sequences,
    heads,
    splits,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds up the splits of one token and head, and its sink."""
    row = tl.program_id(0).to(tl.int64)
    # Padding saw nothing, and its sink doesn't count either.
    padding = row >= tl.load(query_starts + sequences).to(tl.int64) * heads
    parts = tl.arange(0, SPLITS)
    values = tl.arange(0, BLOCK_V)
    at = parts.to(tl.int64) * tokens * heads + row
    mask = parts < tl.where(padding, 0, splits)
    logs = tl.load(part_lse + at, mask=mask, other=-float("inf"))
    peak = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + row % heads).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    given = tl.load(
        part_out + at[:, None] * VALUE + values[None, :],
        mask=mask[:, None] & (values < VALUE)[None, :],
        other=0.0,
    )
    total = tl.where(padding, 1.0, total)
    result = tl.sum(given * weights[:, None], 0) / total
    log = tl.where(padding, -float("inf"), (base + tl.log2(total)) * LN2)
    tl.store(lse + row, log)
    tl.store(out + row * VALUE + values, result.to(out.dtype.element_ty), mask=values < VALUE)
