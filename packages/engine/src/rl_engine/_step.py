"""What every backend does around its micro-batches: agree on a batch, add up shares, hand columns back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_engine._plan import plan_rows
from rl_engine.errors import BatchError, ConfigError
from rl_engine.types import BatchCounts, ModelOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_engine._distributed import World
    from rl_engine._model import Scores
    from rl_engine._rows import PackedRows, RowBatch
    from rl_engine.base import LossFunction


@dataclass(slots=True)
class Tally:
    """What the micro-batches of one call have produced so far; stays on the device until the end."""

    rows: list[int] = field(default_factory=list[int])
    columns: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, rows: list[int], scores: Scores, metrics: Mapping[str, Tensor]) -> None:
        """One micro-batch's scores and shares of metrics."""
        self.rows += rows
        for name in ("logprobs", "entropy", "values"):
            if (column := getattr(scores, name)) is not None:
                self.columns.setdefault(name, []).append(column.detach())
        for name, share in metrics.items():
            self.metrics[name] = self.metrics[name] + share.detach() if name in self.metrics else share.detach()

    def metric_values(self) -> dict[str, float]:
        """One transfer for all of them."""
        if not self.metrics:
            return {}
        return dict(
            zip(self.metrics, torch.stack([share.double() for share in self.metrics.values()]).tolist(), strict=True)
        )


def agree(world: World, prepare: Callable[[], RowBatch], budget: int) -> tuple[RowBatch, BatchCounts, int]:
    """Check every rank's batch; a bad one is an error on all, so that nobody waits for it. Collective.

    Returns:
        This rank's batch, the counts of the whole one, and the micro-batches that the fullest rank needs.

    Raises:
        BatchError: on this rank, or naming the rank that refused.
    """
    batch: RowBatch | None = None
    mine: tuple[float, float, int] | BatchError
    try:
        batch = prepare()
        mine = (*batch.counts(), len(plan_rows(batch.lengths, batch.units(), budget)))
    except BatchError as error:
        mine = error
    answers = world.exchange(mine)
    for rank, answer in enumerate(answers):
        if isinstance(answer, BatchError):
            raise answer if rank == world.rank else BatchError(f"Rank {rank} refused its batch: {answer}")
    good = [answer for answer in answers if not isinstance(answer, BatchError)]
    assert batch is not None
    counts = BatchCounts(tokens=sum(tokens for tokens, _, _ in good), sequences=sum(rows for _, rows, _ in good))
    return batch, counts, max(count for _, _, count in good)


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
        entropy=scores.entropy,
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


def columns_of(batch: RowBatch, tally: Tally, place: torch.device, main: str) -> TensorDict:
    """Per-token results in the order of the batch, on `place`; `main` is there even without a row."""
    if not tally.rows:
        tally.columns[main] = [torch.empty(0)]
    return TensorDict(
        {name: batch.restore(tally.rows, parts).to(place) for name, parts in tally.columns.items()},
        batch_size=[batch.num_rows],
    )
