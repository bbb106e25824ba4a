"""Block manager of the KV cache: who holds which block, and which prefixes blocks hold. No tensors.

A block is written by one sequence only, the one that took it; blocks that several hold are full, never written again.
Full blocks are found again by what they hold: the key of a block is the key of the one before it and its own tokens,
compared exactly, so that a prefix is never taken for another. The first key of a chain, its `root`, tells what else the
content depends on (weight version, adapter).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    Key = tuple[Any, tuple[int, ...]]


class BlockPool:
    """Blocks 0..capacity - 1.

    Args:
        limit: Most blocks that there may ever be.
        block_size: Positions per block.
        capacity: Blocks to begin with; 0 lets the pool grow as it is used.
    """

    def __init__(self, limit: int, block_size: int, capacity: int = 0) -> None:
        self.limit = limit
        self.block_size = block_size
        self.capacity = capacity
        """Blocks that the cache must have room for; grows while more than half of them are held."""
        self._holders: list[int] = [0] * capacity
        self._empty: deque[int] = deque(range(capacity))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Held by nobody, with content that may be found again; the one unused for longest first."""
        self._found_by: dict[Key, tuple[int, int]] = {}
        """Block, and the serial number that stands for it in the keys of those that follow."""
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
        """Blocks for one holder to write to. There must be so many free."""
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
        """Another holder for each."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def give_back(self, blocks: Sequence[int], *, is_spoiled: bool = False) -> list[int]:
        """One holder less for each; those that nobody holds any more are returned. Spoiled ones are not found again."""
        released: list[int] = []
        for block in reversed(blocks):  # the end of a chain is forgotten before its beginning
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
        """The blocks that hold the longest known prefix of these tokens; the caller is a holder of them from now on."""
        found = [block for block, _ in self._chain(root, token_ids)]
        self.share(found)
        return found

    def remember(self, root: Hashable, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """The caller's full blocks hold these tokens. Where another block holds the same, that one stays known."""
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
