"""Batch plans: which replica of the model computes which rows in which micro-batches, and the results brought back.

Every rank passes its own rows, whatever the layout. Ranks that share one replica of the model all compute the rows of
that replica; rows also move where that makes the replicas' work more even.

Legend: `C` completion tokens of a micro-batch, `K` candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rl_engine.batch.micro_batches import WORTH_MOVING, balance_units, bundle, check_budget, plan_rows
from rl_engine.batch.packed import one_token_row
from rl_engine.batch.row_batch import PAIR
from rl_engine.errors import BatchError, EngineError
from rl_engine.types import BatchCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_engine.base import LossFunction
    from rl_engine.batch.micro_batches import CostModel, Load
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.row_batch import RowBatch
    from rl_engine.distributed.world import World
    from rl_engine.types import ModelOutput

AUX_LOSS = "router_aux_loss"
"""The metric of the experts' load balance; every rank has a share of it, also those that hold one replica together."""
MTP_LOSS = "mtp_loss"
"""The metric of the layer for multi-token prediction; on megatron the ranks of the last stage have shares of it."""
COLUMNS = {
    "logprobs": "token_logprobs",
    "entropy": "entropy",
    "sum_pi_squared": "sum_pi_squared",
    "values": "token_values",
    "candidate_token_ids": "top_token_ids",
    "candidate_logprobs": "top_logprobs",
}
"""Columns that an engine gives back, one entry per completion token, and the fields of `ModelOutput` they come from."""
ASKED = {"asked_logprobs": "token_candidate_logprobs"}
"""Further column of rows that name their adapter: the log-probs of `candidate_token_ids`."""

WorkItems = Sequence[tuple[float, Sequence[int]]]
"""The work of rows that go together, and the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReplicas:
    """Replicas of the model, and the ranks that share each."""

    replica_of: tuple[int, ...]
    """Replica of each rank."""
    leaders: tuple[int, ...]
    """Rank that has the results, of each replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Assignment of one logical batch's rows to replicas; the same on every rank."""

    replicas: ModelReplicas
    """Replicas of the model."""
    target: tuple[tuple[int, ...], ...]
    """Replica that computes each row, by rank."""

    def rows_to(self, rank: int, replica: int) -> list[int]:
        """Rows of `rank` that `replica` computes, in order."""
        return [row for row, target in enumerate(self.target[rank]) if target == replica]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Plan of one logical batch, as all ranks see it."""

    own: RowBatch
    """The rows that this rank passed."""
    batch: RowBatch
    """The rows that this rank's replica of the model computes."""
    assignment: Assignment | None
    """Assignment by which `own` became `batch`; None where they are the same."""
    counts: BatchCounts
    """Tokens and sequences of the whole batch."""
    micro_batches: list[list[int]]
    """Rows of `batch` in each micro-batch of this replica."""
    num_micro_batches: int
    """Micro-batches that the replica with most of them has; every rank runs as many."""

    def is_idle(self, index: int) -> bool:
        """Whether this replica has no micro-batch `index`, and runs a dummy so that collectives match."""
        return index >= len(self.micro_batches)

    def mask(self, index: int) -> Tensor | None:
        """(C,) which completion tokens of a micro-batch count; None: all of them, or none of an idle one."""
        if self.is_idle(index) or not self.batch.has("loss_mask"):
            return None
        return self.batch.select(self.micro_batches[index])["loss_mask"].values()

    def pack(self, index: int) -> PackedRows:
        """Micro-batch `index` as the model is fed it; a one-token dummy if this rank has fewer."""
        if self.is_idle(index):
            return one_token_row(self.batch.device)
        return self.batch.pack(self.micro_batches[index], self.counts)


@dataclass(slots=True)
class MicroBatchResults:
    """Results of the micro-batches of one call so far; they stay on the device until the end."""

    fields: Mapping[str, str] = field(default_factory=lambda: COLUMNS)
    """Fields of `ModelOutput` that are kept, by column."""
    rows: list[int] = field(default_factory=list[int])
    """Rows of the plan's `batch`, in the order in which they were computed."""
    columns: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """Values of each micro-batch, `[C]` or (C, K), by column."""
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Sums of the shares so far, scalars, by name."""

    def add(self, rows: list[int], output: ModelOutput, metrics: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's output and shares of metrics."""
        self.rows += rows
        self.add_shares(metrics)
        for name, attribute in self.fields.items():
            if (column := getattr(output, attribute)) is not None:
                self.columns.setdefault(name, []).append(column.detach())

    def add_shares(self, metrics: Mapping[str, Tensor]) -> None:
        """Add shares of metrics alone."""
        for name, share in metrics.items():
            self.metrics[name] = self.metrics[name] + share.detach() if name in self.metrics else share.detach()

    def metric_values(self, *, is_leader: bool) -> dict[str, float]:
        """Values by name, in one transfer. Ranks that share a replica have equal ones, but for those of its experts."""
        named = {name: share for name, share in self.metrics.items() if is_leader or name == AUX_LOSS}
        if not named:
            return {}
        return dict(zip(named, torch.stack([share.double() for share in named.values()]).tolist(), strict=True))


# Before the micro-batches


def plan_batch(
    world: World,
    replicas: ModelReplicas,
    data: TensorDict,
    make: Callable[[TensorDict], RowBatch],
    budget: int,
    cost: CostModel,
    work: str,
) -> BatchPlan:
    """Check every rank's batch, assign its rows to the replicas of the model, and plan micro-batches. Collective.

    A bad batch is an error on all ranks, so that nobody waits for it.

    Args:
        world: All ranks.
        replicas: Replicas of the model.
        data: This rank's rows.
        make: Takes rows apart and refuses what the model cannot take.
        budget: Tokens of one micro-batch.
        cost: Cost of a row.
        work: Purpose of this rank's call, in words.

    Raises:
        BatchError: on this rank, or naming the rank that refused.
        EngineError: ranks mean to do different things.
    """
    own: RowBatch | None = None
    mine: tuple[tuple[float, float], tuple[WorkItems, WorkItems]] | str
    refused: BatchError | None = None
    try:
        own = make(data)
        check_budget(own.tokens(), own.units(), budget)
        mine = own.counts(), _work_items(own, budget, own.costs(cost))
    except BatchError as error:
        mine, refused = str(error), error
    said = world.exchange((work, mine))
    for rank, (other, _) in enumerate(said):
        if other != said[0][0]:
            raise EngineError(f"Ranks call forward_backward_batch for {said[0][0]} (rank 0) and {other} (rank {rank}).")
    answers = [answer for _, answer in said]
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            if refused is not None and rank == world.rank:
                raise refused
            raise BatchError(f"Rank {rank} refused its batch: {answer}")
    good = [answer for answer in answers if not isinstance(answer, str)]
    assert own is not None
    counts = BatchCounts(tokens=sum(tokens for (tokens, _), _ in good), sequences=sum(rows for (_, rows), _ in good))
    assignment = assign_rows(replicas, [work_items for _, work_items in good])
    batch = own if assignment is None else make(send_rows(assignment, own, world))
    tokens, units, costs = batch.tokens(), batch.units(), batch.costs(cost)
    micro_batches = plan_rows(tokens, units, budget, costs=costs)
    count = max(world.exchange(len(micro_batches)))
    if len(micro_batches) < count:
        micro_batches = plan_rows(tokens, units, budget, costs=costs, min_count=count)
    return BatchPlan(
        own=own,
        batch=batch,
        assignment=assignment,
        counts=counts,
        micro_batches=[sorted(rows, key=batch.adapters.__getitem__) for rows in micro_batches]
        if batch.adapters is not None
        else micro_batches,
        num_micro_batches=count,
    )


def work_of(loss_function: LossFunction | None, has_backward: bool) -> str:
    """Purpose of a call, in words."""
    if loss_function is None:
        return "scores alone"
    return "a loss and its gradient" if has_backward else "a loss without its gradient"


def _work_items(own: RowBatch, budget: int, costs: Load) -> tuple[WorkItems, WorkItems]:
    """This rank's rows with those of one prompt together, and by the units that must stay so."""
    bundles = (list(chain.from_iterable(units)) for units in bundle(own.tokens(), own.units(), budget))
    return [(costs.of(rows), rows) for rows in bundles], [(costs.of(unit), unit) for unit in own.units()]


def assign_rows(replicas: ModelReplicas, work: Sequence[tuple[WorkItems, WorkItems]]) -> Assignment | None:
    """Agree on who computes what; None where every rank keeps its rows.

    Args:
        replicas: Replicas of the model.
        work: Rows of each rank, cut twice: as it would like to keep them together, and as finely as they may be cut.
            The finer cut is taken where it gains enough to be worth a move.
    """
    coarse, fine = (_HeldWork(replicas, [cuts[way] for cuts in work]) for way in (0, 1))
    best = fine if fine.owners is not None and fine.fullest < WORTH_MOVING * coarse.fullest else coarse
    if best.owners is None and len(replicas.leaders) == len(replicas.replica_of):
        return None
    target = [[replicas.replica_of[rank]] * sum(len(rows) for _, rows in cuts[0]) for rank, cuts in enumerate(work)]
    for mine, owners in zip(best.items, best.owners or (), strict=False):
        for (rank, _, rows), owner in zip(mine, owners, strict=True):
            for row in rows:
                target[rank][row] = owner
    return Assignment(replicas=replicas, target=tuple(map(tuple, target)))


class _HeldWork:
    """Work items by the replica of the model that has them now, and the replica that had better compute each."""

    def __init__(self, replicas: ModelReplicas, by_rank: Sequence[WorkItems]) -> None:
        self.items: list[list[tuple[int, float, Sequence[int]]]] = [[] for _ in replicas.leaders]
        for rank, work_items in enumerate(by_rank):
            self.items[replicas.replica_of[rank]] += [(rank, cost, rows) for cost, rows in work_items]
        costs = [[cost for _, cost, _ in mine] for mine in self.items]
        self.owners = balance_units(costs)
        loads = [0.0] * len(costs)
        for replica, mine in enumerate(costs):
            for index, cost in enumerate(mine):
                loads[replica if self.owners is None else self.owners[replica][index]] += cost
        self.fullest = max(loads)


def send_rows(assignment: Assignment, own: RowBatch, world: World) -> TensorDict:
    """The rows that this rank's replica computes: those of rank 0 first, each rank's in their order. Collective.

    Raises:
        BatchError: rows that meet have different columns.
    """
    parts = {
        replica: own.select(rows)
        for replica in set(assignment.target[world.rank])
        if (rows := assignment.rows_to(world.rank, replica))
    }
    plain = {replica: {str(name): _to_plain(part.get(name)) for name in part.keys()} for replica, part in parts.items()}  # noqa: SIM118 - a TensorDict iterates rows
    arrived = world.all_to_all([plain.get(replica) for replica in assignment.replicas.replica_of])
    for rank, columns in enumerate(arrived):
        if columns is not None and PAIR in columns:  # each rank numbers its own
            columns[PAIR] = columns[PAIR] * world.size + rank
    found = [columns for columns in arrived if columns is not None]
    differing = next((columns for columns in found if columns.keys() != found[0].keys()), None)
    problems = world.exchange(None if differing is None else (sorted(found[0]), sorted(differing)))
    for problem in problems:
        if problem is not None:
            raise BatchError(f"Ranks passed different columns: {problem[0]} and {problem[1]}. Pass the same ones.")
    if not found:
        return own.select([])
    count = sum(len(assignment.rows_to(rank, assignment.replicas.replica_of[world.rank])) for rank in range(world.size))
    merged = {name: _merge([columns[name] for columns in found]) for name in found[0]}
    return TensorDict(merged, batch_size=[count])  # pyright: ignore[reportArgumentType]


# After each micro-batch, and after all


def add_up(world: World, shares: Mapping[str, float]) -> dict[str, float]:
    """Every rank's shares, summed by name. Collective."""
    metrics: dict[str, float] = {}
    for share in world.exchange(dict(shares)):
        for name, value in share.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return metrics


def columns_of(world: World, plan: BatchPlan, results: MicroBatchResults, place: torch.device, main: str) -> TensorDict:
    """Per-token results of this rank's own rows, on `place`; `main` is there even without a row. Collective."""
    computed = None
    if results.rows:
        batch = plan.batch
        restored = {name: batch.restore(results.rows, parts) for name, parts in results.columns.items()}
        computed = TensorDict(restored, batch_size=[batch.num_rows])  # pyright: ignore[reportArgumentType]
    if plan.assignment is not None:
        computed = return_columns(plan.assignment, computed, plan.own, world)
    if computed is None or main not in computed:
        empty = plan.own.restore([], [torch.empty(0, device=plan.own.device)])
        computed = TensorDict({main: empty}, batch_size=[plan.own.num_rows])  # pyright: ignore[reportArgumentType]
    return computed.to(place)


def return_columns(assignment: Assignment, computed: TensorDict | None, own: RowBatch, world: World) -> TensorDict:
    """Per-token results of this rank's own rows, in their order. Collective.

    Args:
        assignment: Assignment of the rows to replicas.
        computed: This rank's replica's results, in the order of `send_rows`; only leaders need give them.
        own: The rows that this rank passed.
        world: All ranks.
    """
    replica = assignment.replicas.replica_of[world.rank]
    payloads: list[dict[str, Tensor] | None] = [None] * world.size
    if world.rank == assignment.replicas.leaders[replica] and computed is not None and computed.batch_size[0]:
        first = 0
        for rank in range(world.size):
            if count := len(assignment.rows_to(rank, replica)):
                payloads[rank] = {str(name): _span(column, first, count) for name, column in computed.items()}
            first += count
    arrived: list[Any] = world.all_to_all(payloads)
    rows: list[int] = []
    parts: dict[str, list[Tensor]] = {}
    for replica, leader in enumerate(assignment.replicas.leaders):
        if arrived[leader] is not None:
            rows += assignment.rows_to(world.rank, replica)
            for name, values in arrived[leader].items():
                parts.setdefault(name, []).append(values)
    restored = {name: own.restore(rows, values) for name, values in parts.items()}
    return TensorDict(restored, batch_size=[own.num_rows])  # pyright: ignore[reportArgumentType]


def _to_plain(column: Any) -> Any:
    """Something that travels: values and lengths of a jagged column, a tensor, or a list."""
    if isinstance(column, NonTensorStack):
        return column.tolist()
    if column.is_nested:
        return column.values().cpu(), column.offsets().diff().cpu()
    return column.cpu()


def _merge(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return NonTensorStack(*chain.from_iterable(parts))
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    lengths = torch.cat([lengths for _, lengths in parts])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.cat([values for values, _ in parts]), offsets)


def _span(column: Any, first: int, count: int) -> Tensor:
    """Values of rows `first` to `first + count` of a jagged column, on the CPU."""
    offsets = column.offsets()
    return column.values()[int(offsets[first]) : int(offsets[first + count])].cpu()
