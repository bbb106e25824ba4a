"""Covers of parameters: cases in which every two values of two parameters meet, where a product has all of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of a pairwise cover, for `pytest.mark.parametrize`; with two parameters it is their product.

    Greedy: each case is the one of the product that has most pairs which no case before it has, the first of several.
    """
    numbers = [range(len(values)) for values in parameters]
    left = [*itertools.product(*numbers)]
    missing = {pair for case in left for pair in _pairs(case)}
    found: list[tuple[int, ...]] = []
    while missing:
        found.append(max(left, key=lambda case: len(missing.intersection(_pairs(case)))))
        missing.difference_update(_pairs(found[-1]))
    return [tuple(values[i] for values, i in zip(parameters, case, strict=True)) for case in sorted(found)]


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return [*itertools.combinations(enumerate(case), 2)]
