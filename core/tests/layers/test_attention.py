from __future__ import annotations

import torch

from polysilicon.layers.attention import Attention, PagedBatch, allocate_kv_cache


def _layer(**options: object) -> Attention:
    layer = Attention(4, 2, 16, scale=0.25, name="layers.0", **options)  # type: ignore[arg-type]
    layer.attach_cache(*allocate_kv_cache(8, 4, 2, 16))
    return layer


def _step(slots: list[int], table: list[int], length: int) -> PagedBatch:
    return PagedBatch(
        slots=torch.tensor(slots),
        block_tables=torch.tensor([table], dtype=torch.int32),
        query_starts=torch.tensor([0, len(slots)], dtype=torch.int32),
        kv_lengths=torch.tensor([length], dtype=torch.int32),
        max_query=len(slots),
        max_kv=length,
    )


def test_paged_prefill_and_decode_equal_dense() -> None:
    torch.manual_seed(0)
    layer = _layer()
    q, k, v = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
    dense = layer(q, k, v)
    table = [5, 2]
    slots = [20, 21, 22, 23, 8, 9, 10]
    parts = []
    for first, last in ((0, 4), (4, 6), (6, 7)):
        layer.context.batch = _step(slots[first:last], table, last)
        parts.append(layer(q[:, :, first:last], k[:, :, first:last], v[:, :, first:last]))
    torch.testing.assert_close(torch.cat(parts, 1), dense)
