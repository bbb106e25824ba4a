"""Block manager of the KV cache: reference counts of blocks, and the prefix cache. No tensors.

A block is written only by the sequence that took it; shared blocks are full and never written again. Full blocks are
found again by their content: the key of a block is the key of the block before it plus its own tokens, compared
exactly (not by hash), so that no prefix is mistaken for another. The first key of a chain, its `root`, stands for what
else the content depends on (weight version, adapter, images).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    Key = tuple[Any, tuple[int, ...]]


class BlockPool:
    """Pool of cache blocks 0..capacity - 1, with reference counts and a prefix cache.

    Args:
        limit: Most blocks that the pool may grow to.
        block_size: Positions per block.
        capacity: Blocks at the start; the pool grows as it is used.
        remembers: Whether prefixes are found again; not where blocks are only a part of what a token leaves behind.
    """

    def __init__(self, limit: int, block_size: int, capacity: int = 0, *, remembers: bool = True) -> None:
        self.limit, self._remembers = limit, remembers
        self.block_size = block_size
        self.capacity = capacity
        """Blocks that the cache must have room for; grows while more than half of them are held."""
        self._holders: list[int] = [0] * capacity
        self._empty: deque[int] = deque(range(capacity))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks without holders, whose content may be found again; least recently used first."""
        self._found_by: dict[Key, tuple[int, int]] = {}
        """Prefix cache: key to block, and the serial number that represents the key in the keys of its successors."""
        self._key_of: dict[int, Key] = {}
        self._serials = itertools.count()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._empty) + len(self._idle) + self.limit - self.capacity

    @property
    def num_held(self) -> int:
        """Blocks that some sequence holds."""
        return self.capacity - len(self._empty) - len(self._idle)

    def take(self, count: int) -> list[int]:
        """Take so many blocks for one holder to write to; `num_free` must be at least that."""
        taken = [self._take_one() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def _take_one(self) -> int:
        if not self._empty and self.capacity < self.limit and 2 * len(self._idle) <= self.capacity:
            new = range(self.capacity, min(self.limit, max(2 * self.capacity, 64)))
            self._holders.extend([0] * len(new))
            self._empty.extend(new)
            self.capacity = new.stop
        if self._empty:
            return self._empty.popleft()
        block, _ = self._idle.popitem(last=False)
        del self._found_by[self._key_of.pop(block)]
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int], *, is_spoiled: bool = False) -> list[int]:
        """Remove a holder from each block; returns those without holders.

        Spoiled blocks (logits that were not finite) are dropped from the prefix cache.
        """
        released: list[int] = []
        for block in reversed(blocks):  # so that the end of a prefix is evicted before its beginning
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            released.append(block)
            if is_spoiled and block in self._key_of:
                del self._found_by[self._key_of.pop(block)]
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._empty.append(block)
        return released

    def find(self, root: Hashable, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of these tokens; the caller becomes a holder of each."""
        found = [block for block, _ in self._chain(root, token_ids)]
        self.share(found)
        return found

    def remember(self, root: Hashable, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Enter the caller's full blocks, which hold these tokens, into the prefix cache; existing entries stay."""
        if not self._remembers:
            return
        chain = self._chain(root, token_ids)
        parent: Any = chain[-1][1] if chain else root
        for index in range(len(chain), len(token_ids) // self.block_size):
            if blocks[index] in self._key_of:
                return
            key = (parent, self._tokens(token_ids, index))
            parent = next(self._serials)
            self._found_by[key] = (blocks[index], parent)
            self._key_of[blocks[index]] = key

    def _chain(self, root: Hashable, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        chain: list[tuple[int, int]] = []
        parent: Any = root
        for index in range(len(token_ids) // self.block_size):
            entry = self._found_by.get((parent, self._tokens(token_ids, index)))
            if entry is None:
                break
            chain.append(entry)
            parent = entry[1]
        return chain

    def _tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
