"""What the op's samples are too small for: several tiles, many splits, unusual groups."""

import pytest
import torch
from paged_calls import agree, call

from polysilicon.api import Problem
from polysilicon_nvidia.chips import CHIPS
from polysilicon_nvidia.device import absent
from polysilicon_nvidia.kernels import kernels
from polysilicon_nvidia.kernels import paged_attention as kernel
from polysilicon_nvidia.kernels.tiles import tile_for

#: One row of queries more and less than a tile of 128 rows of 4 heads, beside a decode.
TILES = ((33, 40), (1, 70), (31, 31), (64, 129))


@pytest.mark.parametrize("rule", [{}, {"window": 50}, {"causal": False}, {"sinks": True}], ids=str)
def test_prefill_of_several_tiles_finds_each_ones_sequence(torch_device, rule):
    agree(TILES, torch_device, torch.bfloat16, heads=8, block_size=16, padding=9, **rule)


@pytest.mark.parametrize("rule", [{}, {"window": 300}, {"sinks": True, "softcap": 9.0}], ids=str)
def test_decode_of_unlike_lengths_is_split_and_added_up(torch_device, rule):
    lengths = ((1, 1100), (1, 3), (0, 0), (1, 257))
    agree(lengths, torch_device, torch.float16, size=64, block_size=16, padding=2, **rule)


def test_several_tokens_a_sequence_decode_in_one_tile(torch_device):
    agree(((4, 600), (3, 64), (1, 1)), torch_device, torch.bfloat16, heads=8, size=32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (40, 2), (128, 1), (6, 2)])
def test_any_number_of_heads_may_share_a_key(torch_device, heads, kv_heads):
    agree(((9, 20), (1, 30)), torch_device, torch.bfloat16, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("block_size", [3, 128])
def test_a_block_may_hold_any_number_of_tokens(torch_device, block_size):
    agree(((9, 200), (1, 131)), torch_device, torch.float16, block_size=block_size)


def test_a_block_table_may_be_a_column_of_another(torch_device):
    given = call(((1, 40), (1, 9)), torch_device, torch.float32)
    tables = given["block_tables"].t().contiguous().t()
    found = kernel.paged_attention(**{**given, "block_tables": tables})
    torch.testing.assert_close(found[0], kernel.paged_attention(**given)[0])


@pytest.mark.parametrize(
    ("programs", "most", "splits"),
    [(8, 64, 29), (128, 64, 2), (150, 64, 3), (212, 64, 1), (1000, 64, 1), (8, 0, 1), (1, 500, 55)],
)
def test_the_keys_are_split_to_fill_the_chip(programs, most, splits):
    assert kernel.splits_for(programs, most, slots=264) == splits


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_holds_the_heads_that_share_a_key(arch, itemsize):
    groups = [1, 3, 8, 71, 128]
    tiles = [tile_for(arch, size, itemsize, g, 1) for size in (17, 80, 256) for g in groups]
    assert all(tile.rows >= g for tile, g in zip(tiles, groups * 3, strict=True))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"head_size": 512}, "head_size is 512: there are tiles up to 256"),
        ({"v_head_size": 512}, "v_head_size is 512: there are tiles up to 256"),
        ({"heads": 256, "kv_heads": 1}, "256 heads share 1 key heads: a tile holds 128 for each"),
        ({"heads": 32, "kv_heads": 8, "head_size": 128, "softcap": True, "window": 9}, None),
    ],
)
def test_a_problem_without_a_tile_is_refused_with_the_reason(facts, reason):
    (record,) = kernels(absent("nvidia:h200"))
    assert record.supports is not None
    assert record.supports(Problem(op="paged_attention", dtype="bfloat16", facts=facts)) == reason


def test_the_scratch_memory_is_at_most_what_the_record_says():
    (record,) = kernels(absent("nvidia:h200"))
    slots = 2 * max(chip.sms for chip in CHIPS.values())
    programs = (n * kernel.splits_for(n, kernel.MOST_SPLITS, slots) for n in range(1, slots))
    largest = max(programs) * 128 * (256 + 1) * 4
    assert largest <= record.workspace_bytes < 2 * largest


def test_a_cache_of_another_dtype_is_refused(torch_device):
    given = call(((1, 9),), torch_device, torch.float32)
    given["v_cache"] = given["v_cache"].half()
    with pytest.raises(ValueError, match=r"a cache in torch.float32 and torch.float16: it takes"):
        kernel.paged_attention(**given)
