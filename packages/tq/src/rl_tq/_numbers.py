"""Lists of numbers on the wire: those of equal steps, as row numbers and leases mostly are, as three numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_COUNT = 4
_MAX_COUNT = 1 << 28


def shorten(numbers: Sequence[int]) -> Any:
    """As JSON values: the numbers, or `{"of": [first, step, count]}` with step 0 or 1. A range has step 1."""
    count = len(numbers)
    if isinstance(numbers, range):
        return {"of": [numbers.start, 1, count]} if count >= _MIN_COUNT else list(numbers)
    if count >= _MIN_COUNT:
        first = numbers[0]
        if numbers[-1] == first + count - 1 and list(numbers) == list(range(first, first + count)):
            return {"of": [first, 1, count]}
        if numbers[1] == first and list(numbers) == [first] * count:
            return {"of": [first, 0, count]}
    return numbers


def lengthen(value: Any) -> list[int]:
    """The inverse of `shorten`.

    Raises:
        ValueError: it is nothing that `shorten` gives.
    """
    if not isinstance(value, dict):
        return value
    first, step, count = value["of"]
    if step not in (0, 1) or not 0 <= count <= _MAX_COUNT:
        raise ValueError(f"{value} is no list of numbers")
    return list(range(first, first + count)) if step else [first] * count
