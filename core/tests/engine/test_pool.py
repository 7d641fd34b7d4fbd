"""The block pool alone: what it hands out, shares, keeps and takes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polysilicon.engine.pool import ROOT, BlockPool, block_key


def chain(tokens: list[int], size: int) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        keys.append(block_key(keys[-1] if keys else ROOT, tokens[start : start + size]))
    return keys


def published(pool: BlockPool, tokens: list[int]) -> list[int]:
    keys = chain(tokens, pool.block_size)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return blocks


def test_equal_tokens_after_different_parents_have_different_keys() -> None:
    assert chain([1, 2, 3, 4], 2)[1] != chain([5, 6, 3, 4], 2)[1]
    assert chain([1, 2, 3, 4], 2) == chain([1, 2, 3, 4], 2)


def test_released_full_blocks_are_found_again_and_shared() -> None:
    pool = BlockPool(4, 2)
    blocks = published(pool, [1, 2, 3, 4])
    pool.release(blocks)
    found = pool.lookup(chain([1, 2, 3, 4, 5, 6], 2))
    assert found == blocks
    assert pool.idle(found) == 2
    pool.share(found)
    pool.share(found)
    assert pool.in_use == 2
    pool.release(found)
    assert pool.in_use == 2
    pool.release(found)
    assert pool.in_use == 0
    pool.check()


def test_the_end_of_the_oldest_chain_is_evicted_first() -> None:
    pool = BlockPool(4, 1)
    first, second = published(pool, [1, 2]), published(pool, [7, 8])
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]
    assert pool.lookup(chain([1, 2], 1)) == [first[0]]
    assert pool.lookup(chain([7, 8], 1)) == second
    pool.check()


def test_without_sharing_nothing_is_kept() -> None:
    pool = BlockPool(4, 2, sharing=False)
    blocks = published(pool, [1, 2, 3, 4])
    pool.keep_tail(blocks[1], ROOT, [3])
    pool.release(blocks)
    assert pool.lookup(chain([1, 2, 3, 4], 2)) == []
    pool.check()


def test_a_kept_tail_is_taken_over_with_its_common_tokens() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    pool.keep_tail(block, ROOT, [1, 2, 3])
    pool.release([block])
    assert pool.find_tail(ROOT, [1, 2, 9, 9]) == 2
    assert pool.find_tail(b"other", [1, 2]) == 0
    assert pool.claim_tail(ROOT) == block
    assert pool.find_tail(ROOT, [1, 2, 3]) == 0
    pool.check()


def test_a_withdrawn_block_is_not_found() -> None:
    pool = BlockPool(4, 2)
    blocks = published(pool, [1, 2, 3, 4])
    pool.forget(blocks[0])
    assert pool.lookup(chain([1, 2, 3, 4], 2)) == []
    pool.check()


def test_growing_requests_keep_their_blocks_adjacent() -> None:
    pool = BlockPool(12, 1)
    held = [pool.allocate(1, room=4) for _ in range(3)]
    for _ in range(3):
        for blocks in held:
            blocks += pool.allocate(1, after=blocks[-1])
    assert held == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    pool.check()


def test_blocks_set_aside_are_given_out_when_nothing_else_is_left() -> None:
    pool = BlockPool(4, 1)
    pool.allocate(1, room=4)
    assert pool.available == 3
    assert sorted(pool.allocate(3, room=3)) == [1, 2, 3]
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 available"):
        pool.allocate(1)
    pool.check()


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        BlockPool(blocks, size)


class PoolMachine(RuleBasedStateMachine):
    """Random holders of chains over a small pool and a small alphabet, so that prefixes repeat.

    `content` is what the cache would hold: whatever is found must hold the tokens asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 2)
        self.content: dict[int, list[int]] = {}
        self.held: list[tuple[list[int], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), room=st.integers(0, 6))
    def hold(self, tokens: list[int], room: int) -> None:
        pool, size = self.pool, self.pool.block_size
        keys = chain(tokens, size)
        shared = pool.lookup(keys)
        parent = keys[len(shared) - 1] if shared else ROOT
        rest = tokens[len(shared) * size :]
        tail = pool.find_tail(parent, rest[:size])
        need = pool.blocks_for(len(tokens)) - len(shared)
        if need + pool.idle(shared) > pool.available:
            return
        pool.share(shared)
        for index, block in enumerate(shared):
            assert self.content[block] == tokens[index * size : (index + 1) * size]
        blocks = list(shared)
        if tail:
            blocks.append(pool.claim_tail(parent))
            assert self.content[blocks[-1]][:tail] == rest[:tail]
        blocks += pool.allocate(
            need - bool(tail), after=blocks[-1] if blocks else -1, room=max(room, need)
        )
        for index in range(len(shared), len(blocks)):
            self.content[blocks[index]] = tokens[index * size : (index + 1) * size]
            if index < len(keys):
                pool.publish(blocks[index], keys[index])
        self.held.append((blocks, tokens))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), tail=st.booleans())
    def release(self, which: int, tail: bool) -> None:
        blocks, tokens = self.held.pop(which % len(self.held))
        full, rest = divmod(len(tokens), self.pool.block_size)
        if rest and tail:
            keys = chain(tokens, self.pool.block_size)
            parent = keys[full - 1] if full else ROOT
            self.pool.keep_tail(blocks[full], parent, tokens[full * self.pool.block_size :])
        self.pool.release(blocks)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def withdraw(self, which: int) -> None:
        self.pool.forget(self.held[which % len(self.held)][0][0])

    @invariant()
    def holds_together(self) -> None:
        self.pool.check()
        assert self.pool.in_use == len({block for blocks, _ in self.held for block in blocks})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
