"""Which rows share a micro-batch. Pure: knows lengths, not tensors."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence


def plan_rows(
    lengths: Sequence[int], units: Sequence[Sequence[int]] | None, max_tokens: int, *, min_count: int = 0
) -> list[list[int]]:
    """`plan_micro_batches` for rows of which some, those of one unit, must stay side by side.

    Raises:
        BatchError: a unit is longer than the budget.
    """
    if units is None:
        return plan_micro_batches(lengths, max_tokens, min_count=min_count)
    sums = [sum(lengths[row] for row in unit) for unit in units]
    longest = max(range(len(units)), key=sums.__getitem__, default=None)
    if longest is not None and sums[longest] > max_tokens:
        raise BatchError(
            f"Rows {', '.join(map(str, units[longest]))} share a pair_id and have {sums[longest]} tokens; "
            f"max_tokens_per_gpu is {max_tokens}. Raise the budget or shorten them."
        )
    plan = plan_micro_batches(sums, max_tokens, min_count=min_count)
    return [[row for unit in chosen for row in units[unit]] for chosen in plan]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, *, min_count: int = 0) -> list[list[int]]:
    """Cut rows into micro-batches of nearly equal token counts, none above `max_tokens`.

    Longest row first, into the micro-batch that is emptiest so far (Graham 1969). Within a micro-batch rows are ordered
    from long to short, so that rows of like length lie side by side.

    Args:
        lengths: Tokens of each row.
        max_tokens: Budget of one micro-batch.
        min_count: Ask for at least this many micro-batches; fewer come back only where there are fewer rows.

    Returns:
        Row indices of each micro-batch; every row once; as few micro-batches as the greedy rule can do with.

    Raises:
        BatchError: a row is longer than the budget.
    """
    if not lengths:
        return []
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > max_tokens:
        raise BatchError(
            f"Row {longest} has {lengths[longest]} tokens; max_tokens_per_gpu is {max_tokens}. "
            "Raise the budget or shorten the row."
        )
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    count = max(1, -(-sum(lengths) // max_tokens))
    while (plan := _fill(order, lengths, count, max_tokens)) is None:
        count += 1
    wanted = min(min_count, len(lengths))
    if count >= wanted:
        return plan
    return _fill(order, lengths, wanted, max_tokens) or _split(plan, wanted)


def _fill(order: Sequence[int], lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Deal rows, longest first, to the emptiest of `count` micro-batches; None if one overflows."""
    heap = [(0, bin_) for bin_ in range(count)]
    plan: list[list[int]] = [[] for _ in range(count)]
    for row in order:
        load, bin_ = heapq.heappop(heap)
        if load + lengths[row] > max_tokens:
            return None
        plan[bin_].append(row)
        heapq.heappush(heap, (load + lengths[row], bin_))
    return plan


def _split(plan: list[list[int]], count: int) -> list[list[int]]:
    """Halve the micro-batch with most rows until there are `count`."""
    plan = [list(rows) for rows in plan]
    while len(plan) < count:
        rows = max(plan, key=len)
        plan.append(rows[len(rows) // 2 :])
        del rows[len(rows) // 2 :]
    return plan
