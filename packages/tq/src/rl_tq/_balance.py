"""Splits rows of known lengths over parts: pure arithmetic, shared by references and policies."""

from __future__ import annotations

from heapq import heapreplace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

_FRACTION = 1 << 20
_FULL = 1 << 200
"""More than any sum."""


def balanced_order(lengths: Sequence[float], num_parts: int) -> list[int]:
    """Positions in an order whose `num_parts` contiguous parts have equal counts and nearly equal sums of `lengths`.

    Longest first, each to the part with the smallest sum that has room; `len(lengths)` must divide. Inside a part, rows
    stand in their first order. Lengths that are no integers count to a millionth.
    """
    is_whole = isinstance(sum(lengths), int)
    sizes = cast("Sequence[int]", lengths) if is_whole else [int(length * _FRACTION) for length in lengths]
    room = len(lengths) // num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # A heap of integers, sum * num_parts + part, which are compared faster than pairs.
    sums: list[int] = list(range(num_parts))
    longest_first: list[int] = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    for position in longest_first:
        key = sums[0]
        mine = parts[key % num_parts]
        mine.append(position)
        heapreplace(sums, key + num_parts * sizes[position] if len(mine) < room else _FULL)
    order: list[int] = []
    for part in parts:
        part.sort()
        order += part
    return order
