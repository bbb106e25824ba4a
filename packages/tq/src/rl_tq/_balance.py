"""Splits rows of known lengths over parts: pure arithmetic, shared by references and policies."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def balanced_order(lengths: Sequence[float], num_parts: int) -> list[int]:
    """Positions in an order whose `num_parts` contiguous parts have equal counts and nearly equal sums of `lengths`.

    Longest first, each to the part with the smallest sum that has room; `len(lengths)` must divide. Inside a part, rows
    stand in their first order.
    """
    room = len(lengths) // num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [(0.0, part) for part in range(num_parts)]
    for position in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total, part = sums[0]
        mine = parts[part]
        mine.append(position)
        if len(mine) < room:
            heapq.heapreplace(sums, (total + lengths[position], part))
        else:
            heapq.heappop(sums)
    return [position for part in parts for position in sorted(part)]
