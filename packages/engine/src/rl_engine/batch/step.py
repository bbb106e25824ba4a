"""What every backend does around its micro-batches: agree on a batch, add up shares, hand columns back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_engine.batch.load_balance import assign_rows, return_columns, send_rows
from rl_engine.batch.micro_batches import bundle, check_budget, plan_rows
from rl_engine.errors import BatchError, ConfigError, EngineError
from rl_engine.types import BatchCounts, ModelOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_engine.base import LossFunction
    from rl_engine.batch.cost import CostModel
    from rl_engine.batch.load_balance import Assignment, ModelReplicas, WorkItems
    from rl_engine.batch.micro_batches import Load
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.results import MicroBatchResults, Scores
    from rl_engine.batch.row_batch import RowBatch
    from rl_engine.distributed.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One logical batch as all ranks see it."""

    own: RowBatch
    """The rows that this rank passed."""
    batch: RowBatch
    """The rows that this rank's copy of the model computes."""
    assignment: Assignment | None
    """How the one became the other; None where they are the same."""
    counts: BatchCounts
    """Of the whole batch."""
    micro_batches: list[list[int]]
    """Rows of `batch` in each micro-batch of this replica."""
    num_micro_batches: int
    """Micro-batches that the fullest copy needs; every rank runs as many."""


def plan_batch(
    world: World,
    replicas: ModelReplicas,
    data: TensorDict,
    make: Callable[[TensorDict], RowBatch],
    budget: int,
    cost: CostModel,
    work: str,
) -> BatchPlan:
    """Check every rank's batch, deal its rows to the copies of the model, and plan micro-batches. Collective.

    A bad batch is an error on all ranks, so that nobody waits for it.

    Args:
        world: All ranks.
        replicas: Of the model.
        data: This rank's rows.
        make: Takes rows apart and refuses what the model cannot take.
        budget: Tokens of one micro-batch.
        cost: Of a row.
        work: What this rank means to do with its rows, in words.

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
        own=own, batch=batch, assignment=assignment, counts=counts, micro_batches=micro_batches, num_micro_batches=count
    )


def work_of(loss_function: LossFunction | None, has_backward: bool) -> str:
    """What a call is for, in words."""
    if loss_function is None:
        return "scores alone"
    return "a loss and its gradient" if has_backward else "a loss without its gradient"


def _work_items(own: RowBatch, budget: int, costs: Load) -> tuple[WorkItems, WorkItems]:
    """This rank's rows with those of one prompt together, and by the units that must stay so."""
    bundles = (list(chain.from_iterable(units)) for units in bundle(own.tokens(), own.units(), budget))
    return [(costs.of(rows), rows) for rows in bundles], [(costs.of(unit), unit) for unit in own.units()]


def apply_loss(
    loss_function: LossFunction, packed: PackedRows, scores: Scores, counts: BatchCounts, columns: TensorDict
) -> dict[str, Tensor]:
    """This micro-batch's share of the loss, under `loss`, and of the metrics.

    Raises:
        ConfigError: a metric takes the loss's name.
    """
    output = ModelOutput(
        token_logprobs=scores.logprobs,
        token_values=scores.values,
        token_candidate_logprobs=scores.asked,
        entropy=scores.entropy,
        sum_pi_squared=scores.sum_pi_squared,
        cu_seqlens=packed.cu_seqlens,
        counts=counts,
    )
    loss, shares = loss_function(output, columns)
    if "loss" in shares:
        raise ConfigError("A loss function's metrics may not be named 'loss'; the engine reports the loss itself.")
    return {"loss": loss, **shares}


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
