"""Placement: which replica gets a request, by session, by prefix, else by load. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

K = TypeVar("K")

BLOCK_TOKENS = 16
"""Prefixes are compared by blocks of this many tokens, as servers cache them."""
MAX_BLOCKS = 65_536
"""Blocks that are remembered; the least recently used are forgotten first."""
MAX_SESSIONS = 65_536
"""Conversations whose replica is remembered; the least recently used is forgotten first."""
MAX_IMBALANCE = 8
"""A prefix is followed only to a replica with at most so many requests more than the least loaded one."""


class Placement(Generic[K]):
    """Remembers who has seen which session and which prefix."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, K] = OrderedDict()
        self._blocks: OrderedDict[int, K] = OrderedDict()

    def choose(self, loads: Mapping[K, int], token_ids: Sequence[int], session_id: str | None) -> K:
        """One of `loads`, which are requests by replica and not empty; what was chosen is remembered."""
        blocks = block_keys(token_ids)
        chosen = self._sessions.get(session_id) if session_id is not None else None
        if chosen is None or chosen not in loads:
            chosen = self._by_prefix(loads, blocks)
        if session_id is not None:
            remember(self._sessions, session_id, chosen, MAX_SESSIONS)
        for block in blocks:
            remember(self._blocks, block, chosen, MAX_BLOCKS)
        return chosen

    def _by_prefix(self, loads: Mapping[K, int], blocks: Sequence[int]) -> K:
        least = min(loads, key=lambda each: loads[each])
        holders = (self._blocks.get(block) for block in reversed(blocks))
        longest = next((holder for holder in holders if holder is not None and holder in loads), None)
        if longest is not None and loads[longest] <= loads[least] + MAX_IMBALANCE:
            return longest
        return least

    def forget_prefixes(self) -> None:
        """Caches were flushed."""
        self._blocks.clear()


def block_keys(token_ids: Sequence[int]) -> list[int]:
    """One key per full block, of the block and all before it."""
    keys: list[int] = []
    key = 0
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *token_ids[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys


def remember(known: OrderedDict[str, K] | OrderedDict[int, K], key: str | int, value: K, limit: int) -> None:
    """Keep the newest `limit` entries."""
    entries: OrderedDict[str | int, K] = known  # pyright: ignore[reportAssignmentType]  # both are of one kind of key
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > limit:
        entries.popitem(last=False)
