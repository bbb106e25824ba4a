"""Splits rows of known lengths over parts: pure arithmetic, shared by references and policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

_FRACTION = 1 << 20


def balanced_order(lengths: Sequence[float], num_parts: int) -> list[int]:
    """Positions in an order whose `num_parts` contiguous parts have equal counts and nearly equal sums of `lengths`.

    As `rl_csrc.rows.balanced_order`; `len(lengths)` must divide. Lengths that are no integers count to a millionth.
    """
    from rl_csrc import rows  # brings torch, which references do without until here

    is_whole = isinstance(sum(lengths), int)
    sizes = cast("list[int]", [*lengths]) if is_whole else [int(length * _FRACTION) for length in lengths]
    return rows.balanced_order(sizes, num_parts)
