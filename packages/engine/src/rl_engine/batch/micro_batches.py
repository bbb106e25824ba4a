"""Planning of micro-batches and load balance over ranks. Pure: knows lengths and costs, not tensors.

A *unit* is rows that must stay together (a pair), or one row. Rows that share tokens are kept together too, where a
micro-batch has room.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_engine.batch.prefix_tree import PrefixTree

Item = TypeVar("Item")

_EXACT_ENOUGH = 2**20  # items times groups
WORTH_MOVING = 0.95  # of the fullest rank's cost; rows stay where they are for a smaller gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of rows, in tokens or work; rows that begin with the same tokens have their load once."""

    alone: Sequence[float]
    """Load of each row by itself."""
    prefix: Callable[[int, int], float]
    """Load of the first tokens of a row, by the row and how many they are."""
    tree: PrefixTree
    """What rows share."""

    def of(self, rows: Sequence[int]) -> float:
        """Load of rows of one micro-batch."""
        shared = ((row, self.tree.common(row, other)) for row, other in pairwise(self.tree.ordered(rows)))
        return sum(self.alone[row] for row in rows) - sum(self.prefix(row, depth) for row, depth in shared if depth)


def check_budget(tokens: Load, units: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Refuse a row, or rows that must stay side by side, that no micro-batch can hold.

    Raises:
        BatchError: names the longest.
    """
    longest = max(range(len(tokens.alone)), key=tokens.alone.__getitem__, default=None)
    if longest is not None and tokens.alone[longest] > max_tokens:
        raise BatchError(
            f"Row {longest} has {tokens.alone[longest]} tokens; max_tokens_per_gpu is {max_tokens}. "
            "Raise the budget or shorten the row."
        )
    for unit in units:
        if (total := int(tokens.of(unit))) > max_tokens:
            raise BatchError(
                f"Rows {', '.join(map(str, unit))} share a pair_id and have {total} tokens; "
                f"max_tokens_per_gpu is {max_tokens}. Raise the budget or shorten them."
            )


def plan_rows(
    tokens: Load,
    units: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    costs: Load | None = None,
    min_count: int = 0,
) -> list[list[int]]:
    """`plan_micro_batches` for rows of which some must stay side by side, and some had better."""
    bundles = bundle(tokens, units, max_tokens)
    if len(bundles) < min_count:
        bundles = _split(bundles, min(min_count, len(units)))
    chosen = [list(chain.from_iterable(bundle)) for bundle in bundles]
    sizes = [int(tokens.of(rows)) for rows in chosen]
    work = None if costs is None else [costs.of(rows) for rows in chosen]
    plan = plan_micro_batches(sizes, max_tokens, costs=work, min_count=min_count)
    return [[row for index in together for row in chosen[index]] for together in plan]


def bundle(tokens: Load, units: Sequence[Sequence[int]], max_tokens: int) -> list[list[Sequence[int]]]:
    """Units that share tokens together; in several bundles where they have more than `max_tokens`."""
    tree = tokens.tree
    together: dict[int, list[Sequence[int]]] = {}
    for unit in units:
        together.setdefault(tree.groups[unit[0]], []).append(unit)
    bundles: list[list[Sequence[int]]] = []
    for alike in together.values():
        if tokens.of([row for unit in alike for row in unit]) <= max_tokens:
            bundles.append(alike)
            continue
        order = sorted(alike, key=lambda unit: tree.rank[unit[0]])
        depths = [tree.common(one[0], other[0]) for one, other in pairwise(order)]
        prompt = int(tokens.prefix(order[0][0], min(depths)))
        parts = [[unit] for unit in alike]
        if len({*depths}) > 1:  # neighbours share more than all do
            parts = _fill_in_order(tokens, order, max_tokens)
        sizes = [int(tokens.of([row for unit in part for row in unit])) - prompt for part in parts]
        plans = plan_micro_batches(sizes, max_tokens - prompt)
        bundles += [[unit for index in plan for unit in parts[index]] for plan in plans]
    return bundles


def _fill_in_order(tokens: Load, units: Sequence[Sequence[int]], max_tokens: int) -> list[list[Sequence[int]]]:
    """Neighbouring units in as few parts as they fit into one after the other."""
    parts: list[list[Sequence[int]]] = []
    rows: list[int] = []
    for unit in units:
        if not parts or tokens.of([*rows, *unit]) > max_tokens:
            parts.append([])
            rows = []
        parts[-1].append(unit)
        rows += unit
    return parts


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, costs: Sequence[float] | None = None, min_count: int = 0
) -> list[list[int]]:
    """Cut rows into micro-batches of nearly equal cost, none above `max_tokens`.

    By `partition`; where its answer is too long for the budget, longest row first into the micro-batch with fewest
    tokens (Graham 1969). Within a micro-batch rows are ordered from long to short, so that rows of like length lie side
    by side.

    Args:
        lengths: Tokens of each row, none above `max_tokens`.
        max_tokens: Budget of one micro-batch.
        costs: Work of each row; its tokens where not given.
        min_count: Ask for at least this many micro-batches; fewer come back only where there are fewer rows.

    Returns:
        Row indices of each micro-batch; every row once; as few micro-batches as the two rules can do with.
    """
    if not lengths:
        return []
    work: Sequence[float] = lengths if costs is None else costs
    count = max(1, -(-sum(lengths) // max_tokens))
    while (plan := _balanced(lengths, work, count, max_tokens)) is None:
        count += 1
    wanted = min(min_count, len(lengths))
    if count < wanted:
        plan = _balanced(lengths, work, wanted, max_tokens) or _split(plan, wanted)
    return [sorted(rows, key=lambda row: (-lengths[row], row)) for rows in plan]


def partition(costs: Sequence[float], count: int) -> list[list[int]]:
    """Indices of `costs` in `count` groups of nearly equal sums, by the largest differencing method.

    Karmarkar and Karp (1982): partial partitions with the largest spread are merged, each one's largest group with the
    other's smallest. Groups come back from the largest sum to the smallest. Many thousand items for many groups go
    longest first to the smallest group, which takes less time.
    """
    if len(costs) * count > _EXACT_ENOUGH:
        return _fill(costs, count, math.inf) or []
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, cost in enumerate(costs):
        groups = [(float(cost), [index]), *((0.0, list[int]()) for _ in range(count - 1))]
        heap.append((-(groups[0][0] - groups[-1][0]), index, groups))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), order, merged))
    return [group for _, group in heap[0][2]] if heap else [[] for _ in range(count)]


def balance_units(costs: Sequence[Sequence[float]]) -> list[list[int]] | None:
    """Balance units of work over ranks, when rank r holds units of `costs[r]`.

    Args:
        costs: Cost of each unit, by rank.

    Returns:
        By rank, by unit, the rank that computes it; None where moving would gain less than a twentieth. As much work
        as a greedy choice allows stays where it is.
    """
    size = len(costs)
    flat = [(rank, unit) for rank, mine in enumerate(costs) for unit in range(len(mine))]
    groups = partition([costs[rank][unit] for rank, unit in flat], size)
    fullest = max(map(sum, costs), default=0.0)
    dealt = max(sum(costs[flat[item][0]][flat[item][1]] for item in group) for group in groups)
    if dealt >= WORTH_MOVING * fullest:
        return None
    kept = [[0.0] * size for _ in groups]
    for index, group in enumerate(groups):
        for item in group:
            rank, unit = flat[item]
            kept[index][rank] += costs[rank][unit]
    owner: dict[int, int] = {}
    for _, index, rank in sorted((-kept[index][rank], index, rank) for index in range(size) for rank in range(size)):
        if index not in owner and rank not in owner.values():
            owner[index] = rank
    answer = [[0] * len(mine) for mine in costs]
    for index, group in enumerate(groups):
        for item in group:
            rank, unit = flat[item]
            answer[rank][unit] = owner[index]
    return answer


def _balanced(lengths: Sequence[int], costs: Sequence[float], count: int, max_tokens: int) -> list[list[int]] | None:
    """Exactly `count` groups within the budget, or None."""
    plan = partition(costs, count)
    if all(rows and sum(lengths[row] for row in rows) <= max_tokens for rows in plan):
        return plan
    return _fill(lengths, count, max_tokens)


def _fill(lengths: Sequence[float], count: int, max_tokens: float) -> list[list[int]] | None:
    """Deal rows, longest first, to the emptiest of `count` micro-batches; None if one overflows."""
    heap = [(0.0, bin_) for bin_ in range(count)]
    plan: list[list[int]] = [[] for _ in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, bin_ = heapq.heappop(heap)
        if load + lengths[row] > max_tokens:
            return None
        plan[bin_].append(row)
        heapq.heappush(heap, (load + lengths[row], bin_))
    return plan


def _split(plan: list[list[Item]], count: int) -> list[list[Item]]:
    """Halve the list with most items until there are `count`, which is not above the number of items."""
    plan = [list(items) for items in plan]
    while len(plan) < count:
        items = max(plan, key=len)
        plan.append(items[len(items) // 2 :])
        del items[len(items) // 2 :]
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Counts of one architecture; a backward pass costs twice as much everywhere, so it changes no comparison."""

    per_token: float
    """Products with the weights that a token meets: two operations for each (Kaplan et al., 2001.08361)."""
    per_pair: float
    """Score and weighted sum of one query with one key, in all heads of one layer."""
    per_score: float
    """Projection of one completion token onto the vocabulary."""
    windows: tuple[int | None, ...]
    """Keys that a query sees in each attention layer; None: all before it."""

    def __call__(self, fed: int, scored: int) -> float:
        """Operations for a row of F = `fed` tokens with C = `scored` of them completion."""
        pairs = sum(_pairs(fed, window) for window in self.windows)
        return self.per_token * fed + self.per_pair * pairs + self.per_score * scored


def cost_model(config: Any, shapes: Mapping[str, Sequence[int]]) -> CostModel:
    """The counts of a transformers config and the shapes of its trunk's parameters (no embedding, no head).

    Experts count as far as a token meets them. Layers without attention, or of a kind not known here, have no pairs.
    """
    experts = _first(config, ("num_experts", "num_local_experts", "n_routed_experts"), 0)
    share = _first(config, ("num_experts_per_tok",), 1) / experts if experts else 1.0
    per_token = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        size = 2.0
        for length in shape:
            size *= length
        per_token += size * (share if ".experts." in name else 1.0)
    hidden = int(_first(config, ("hidden_size", "n_embd", "d_model"), 0))
    heads = int(_first(config, ("num_attention_heads", "n_head"), 1))
    head_dim = int(_first(config, ("head_dim",), hidden // heads))
    layers = int(_first(config, ("num_hidden_layers", "n_layer"), 1))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None)
    seen = {"full_attention": None, "sliding_attention": window}
    return CostModel(
        per_token=per_token,
        per_pair=4.0 * heads * head_dim,
        per_score=2.0 * hidden * config.vocab_size,
        windows=tuple(seen[kind] for kind in kinds if kind in seen),
    )


def _pairs(length: int, window: int | None) -> int:
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _first(config: Any, names: Sequence[str], default: float) -> float:
    """The first of these settings that the config has; architectures name them differently."""
    return next((value for name in names if (value := getattr(config, name, None))), default)
