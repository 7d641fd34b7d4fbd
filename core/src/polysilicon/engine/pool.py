"""The blocks of the KV cache: reference counts, prefix sharing, and what stays after a request.

A full block is known by the hash of its parent's hash and its tokens, so two equal hashes mean
equal tokens from the very start. Full blocks are shared without copying. The last, partly filled
block of a finished request is kept too, under its parent's hash: the next turn of a conversation
takes it over (nobody else holds it) and goes on writing where it ended.

Blocks of one request are handed out next to each other where that is possible, with blank blocks
set aside for its growth: a kernel can then read its keys and values without gathering them. This
is a preference only: a block set aside still counts as available.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Parent hash of a first block.
ROOT = b""

# Whether a block is blank (free, without content worth keeping), and whether it is set aside.
_NOT_BLANK, _BLANK, _ASIDE = 0, 1, 2


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block: of the parent's hash and the block's tokens."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out block numbers; it never touches the cache itself."""

    def __init__(self, num_blocks: int, block_size: int, *, sharing: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool of {num_blocks} blocks of {block_size} tokens: expected at least 1 of each"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sharing = sharing
        self._references = [0] * num_blocks
        self._blank = bytearray([_BLANK]) * num_blocks
        self._num_blank = num_blocks
        # Free blocks with content worth keeping, those unused for longest first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tail_of: dict[bytes, tuple[int, list[int]]] = {}
        self._tail_parent: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, kept ones included."""
        return self._num_blank + len(self._kept)

    @property
    def in_use(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """How many blocks that many tokens fill."""
        return -(-tokens // self.block_size)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of a chain of keys."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks no request holds (sharing them uses up `available`)."""
        return sum(1 for block in blocks if not self._references[block])

    def share(self, blocks: Sequence[int]) -> None:
        """Takes one more reference to each block."""
        for block in blocks:
            if not self._references[block]:
                del self._kept[block]
            self._references[block] += 1

    def allocate(self, count: int, *, after: int = -1, room: int = 0) -> list[int]:
        """Blocks for one holder, blank ones first, then those unused for longest.

        Args:
            count: how many.
            after: the holder's last block so far; -1 when it has none.
            room: how many it may need in the end, `count` included; 0 when that was said before.

        Raises:
            RuntimeError: fewer are available; callers look at `available` first.
        """
        if count > self.available:
            raise RuntimeError(f"{count} blocks asked for, {self.available} available")
        first = self._place(count, after, room)
        if first < 0:
            # Sorted, because a chain is evicted from its end and was adjacent perhaps.
            blocks = sorted(self._any_free() for _ in range(count))
        else:
            blocks = list(range(first, first + count))
            for block in blocks:
                self._use_blank(block)
            self._set_aside(first + count, first + room)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """Offers a full block for sharing; the first block with a key is the one that is shared."""
        if self.sharing and key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Withdraws a held block whose content turned out not to be what its key says."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each block of a chain, given in chain order.

        The end of the chain becomes the oldest, since a block is of no use without its parents.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of or block in self._tail_parent:
                self._kept[block] = None
            else:
                self._make_blank(block)
        # What was set aside for the holder's growth is anyone's again.
        block = blocks[-1] + 1 if blocks else self.num_blocks
        while block < self.num_blocks and self._blank[block] == _ASIDE:
            self._blank[block] = _BLANK
            block += 1

    def keep_tail(self, block: int, parent: bytes, tokens: list[int]) -> None:
        """Remembers what a partly filled block holds, which its only holder will now release."""
        if not self.sharing or block in self._key_of or self._references[block] != 1:
            return
        self._drop_tail(parent)
        self._tail_of[parent] = (block, tokens)
        self._tail_parent[block] = parent

    def find_tail(self, parent: bytes, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` the kept tail after `parent` holds."""
        tail = self._tail_of.get(parent)
        if tail is None or self._references[tail[0]]:
            return 0
        common = 0
        for kept, asked in zip(tail[1], tokens, strict=False):
            if kept != asked:
                break
            common += 1
        return common

    def claim_tail(self, parent: bytes) -> int:
        """Hands the kept tail after `parent` to one holder, who may write into it."""
        block, _ = self._tail_of.pop(parent)
        del self._tail_parent[block]
        del self._kept[block]
        self._references[block] = 1
        return block

    def check(self) -> None:
        """Asserts what must hold between any two calls."""
        blank = {block for block, state in enumerate(self._blank) if state}
        free = blank | self._kept.keys()
        assert len(blank) == self._num_blank, "blank blocks were miscounted"
        assert len(free) == self.available, "a block is free twice"
        held = {b for b, count in enumerate(self._references) if count}
        assert min(self._references) >= 0, "a block was released more often than taken"
        assert not free & held, "a held block is free"
        assert len(free) + len(held) == self.num_blocks, "a block is lost"
        assert self._block_of == {key: block for block, key in self._key_of.items()}
        tails = {block: parent for parent, (block, _) in self._tail_of.items()}
        assert tails == self._tail_parent
        assert not tails.keys() & self._key_of.keys(), "a full block is also a tail"
        assert set(self._kept) <= self._key_of.keys() | tails.keys(), "a blank block is kept"
        assert not blank & (self._key_of.keys() | tails.keys()), "content is lost"

    def _place(self, count: int, after: int, room: int) -> int:
        """First of `count` adjacent blank blocks, best right behind the holder's last; or -1."""
        behind = self._blank[after + 1 : after + 1 + count]
        # A holder that grows takes what was set aside for it.
        usable = _NOT_BLANK not in behind if not room else behind == bytes([_BLANK]) * count
        if after >= 0 and len(behind) == count and usable:
            return after + 1
        roomy = self._blank.find(bytes([_BLANK]) * max(room, count))
        return roomy if roomy >= 0 else self._blank.find(bytes([_BLANK]) * count)

    def _any_free(self) -> int:
        """Takes a blank block, else the one kept unused for longest, else one set aside."""
        block = self._blank.find(_BLANK)
        if block < 0 and self._kept:
            return self._evict()
        if block < 0:
            block = self._blank.find(_ASIDE)
        self._use_blank(block)
        return block

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self.forget(block)
        parent = self._tail_parent.pop(block, None)
        if parent is not None:
            del self._tail_of[parent]
        return block

    def _use_blank(self, block: int) -> None:
        self._blank[block] = _NOT_BLANK
        self._num_blank -= 1

    def _set_aside(self, start: int, end: int) -> None:
        for block in range(start, min(end, self.num_blocks)):
            if self._blank[block] != _BLANK:
                return
            self._blank[block] = _ASIDE

    def _make_blank(self, block: int) -> None:
        self._blank[block] = _BLANK
        self._num_blank += 1

    def _drop_tail(self, parent: bytes) -> None:
        if parent not in self._tail_of:
            return
        block, _ = self._tail_of.pop(parent)
        del self._tail_parent[block]
        if not self._references[block]:
            del self._kept[block]
            self._make_blank(block)
