"""Prefix tree of a batch's rows: which of them begin with the same tokens, and how many those are.

In lexicographic order rows of one branch are neighbours, and two rows have as many tokens in common as the neighbours
between them that have the fewest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

MIN_ALIKE = 32
"""Tokens that rows of different prompts begin with at least, where neither goes on from the other's prompt, to share
them: it costs a copy of their keys and values."""
MIN_APART = 16
"""Tokens between two branch points at least, but for the ends of prompts; the later is moved to the earlier otherwise:
runs of attention that are shorter cost more than their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Prefix tree of B rows."""

    rank: Sequence[int]
    """Position of each row in lexicographic order."""
    depths: Sequence[int]
    """B - 1 entries, tokens that the rows at positions i and i + 1 share."""
    groups: Sequence[int]
    """Number for each row; rows of one number share tokens, others do not."""

    def ordered(self, rows: Sequence[int]) -> list[int]:
        """Rows in lexicographic order."""
        return sorted(rows, key=self.rank.__getitem__)

    def common(self, row: int, other: int) -> int:
        """Tokens that two rows share, of which `row` comes first in lexicographic order."""
        if self.groups[row] != self.groups[other]:
            return 0
        return min(self.depths[self.rank[row] : self.rank[other]])

    def runs(self, rows: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """Runs of tokens that rows share, and those that one has alone: the rows, the first token and its stop.

        A row's own run has no stop of its own (-1): it goes to the row's end.
        """
        order = self.ordered(rows)
        common = [self.common(row, other) for row, other in pairwise(order)]
        todo = [(0, len(order), 0)]
        while todo:
            first, last, start = todo.pop()
            if last - first == 1:
                yield order[first:last], start, -1
                continue
            stop = min(common[first : last - 1])
            if stop > start:
                yield order[first:last], start, stop
            cuts = [first, *(at + 1 for at in range(first, last - 1) if common[at] == stop), last]
            todo += [(*branch, stop) for branch in pairwise(cuts)]


def unshared(num_rows: int) -> PrefixTree:
    """The tree of rows that share nothing, whatever their tokens."""
    return PrefixTree(rank=range(num_rows), depths=[0] * (num_rows - 1), groups=range(num_rows))


def prefix_tree(rows: Sequence[np.ndarray], prompts: Sequence[int]) -> PrefixTree:
    """Find what rows share.

    Args:
        rows: (tokens,) integers each, the tokens that the model is fed.
        prompts: Tokens of each row's prompt.
    """
    keys = [row.astype(">i4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [_common(rows[one], rows[other]) for one, other in pairwise(order)]
    lengths = [prompts[row] for row in order]
    after, before = _goes_on(lengths[:-1], common), _goes_on(lengths[:0:-1], common[::-1])[::-1]
    depths = [
        depth if depth >= MIN_ALIKE or one or other else 0
        for depth, one, other in zip(common, after, before, strict=True)
    ]
    rank, groups = [0] * len(rows), [0] * len(rows)
    firsts = [position for position in range(len(rows)) if not position or not depths[position - 1]]
    for number, (first, stop) in enumerate(pairwise([*firsts, len(rows)])):
        for position in range(first, stop):
            rank[order[position]], groups[order[position]] = position, number
        depths[first : stop - 1] = _apart(depths[first : stop - 1], {*lengths[first:stop]})
    return PrefixTree(rank=rank, depths=depths, groups=groups)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two rows begin with."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _goes_on(prompts: Sequence[int], common: Sequence[int]) -> list[bool]:
    """Whether the row behind each goes on from its prompt, or from that of a row in front which it goes on from too."""
    found, shortest = list[bool](), sys.maxsize
    for prompt, depth in zip(prompts, common, strict=True):
        shortest = min(shortest, prompt)
        found.append(shortest <= depth)
        if not found[-1]:
            shortest = sys.maxsize
    return found


def _apart(depths: Sequence[int], ends: set[int]) -> list[int]:
    """Branch points of one group with close ones moved to the one before, or to the end of a prompt between."""
    moved, last = dict[int, int](), 0
    for depth in sorted({*depths}):
        is_apart = depth - last >= MIN_APART
        last = depth if is_apart else max([last, *(end for end in ends if end <= depth)])
        moved[depth] = last
    return [moved[depth] for depth in depths]
