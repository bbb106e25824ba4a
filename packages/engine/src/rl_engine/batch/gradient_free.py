"""Rows that give no gradient are scored without a backward pass; loss, metrics and gradient stay those of the batch.

A loss says which rows have a gradient (`has_gradient`, see `rl_engine.base.LossFunction`). The others are a second
call, forward only, with its own micro-batches: each call is balanced over the ranks, and both divide by the counts of
the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from tensordict import TensorDict

from rl_engine.base import is_token_local
from rl_engine.batch.row_batch import PAIR, RowBatch
from rl_engine.types import BatchCounts, EngineOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.distributed.world import World
    from rl_engine.types import ModelOutput


class ForwardBackward(Protocol):
    """Forward pass, and backward pass where asked for, over this rank's rows. Collective."""

    def __call__(self, data: TensorDict, loss_function: LossFunction, *, has_backward: bool) -> EngineOutput:
        """See `Engine.forward_backward_batch`."""
        ...


@dataclass(frozen=True, slots=True)
class _OfWholeBatch:
    """A loss function whose shares are of a larger batch than it is called for."""

    loss_function: LossFunction
    counts: BatchCounts

    @property
    def is_token_local(self) -> bool:
        """See `rl_engine.base.LossFunction`."""
        return is_token_local(self.loss_function)

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss_function(replace(output, counts=self.counts), rows)


def forward_backward(run: ForwardBackward, data: TensorDict, loss: LossFunction, world: World) -> EngineOutput:
    """Forward pass over all rows, backward pass over those that have a gradient. Collective.

    All rows are differentiated in one call if no rank has a row without gradient; if no rank has a row with one, so
    that optimizer, schedule and weight decay see gradients of 0; and if a rank's rows are invalid, which that call
    reports.
    """
    if not hasattr(loss, "has_gradient"):
        return run(data, loss, has_backward=True)
    own = _split(data, loss)
    answers = world.exchange(None if own is None else (len(own.with_gradient), len(own.without), *own.batch.counts()))
    known = [answer for answer in answers if answer is not None]
    if own is None or len(known) < len(answers):
        return run(data, loss, has_backward=True)
    with_gradient, without, tokens, sequences = map(sum, zip(*known, strict=True))
    if not with_gradient or not without:
        return run(data, loss, has_backward=True)
    whole = _OfWholeBatch(loss, BatchCounts(tokens=tokens, sequences=sequences))
    learned = run(own.batch.select(own.with_gradient), whole, has_backward=True)
    scored = run(own.batch.select(own.without), whole, has_backward=False)
    metrics = dict(learned.metrics)
    for name, share in scored.metrics.items():
        metrics[name] = metrics.get(name, 0.0) + share
    count = learned.num_micro_batches + scored.num_micro_batches
    return EngineOutput(columns=_in_order(own, learned, scored), metrics=metrics, num_micro_batches=count)


def _in_order(own: _Rows, learned: EngineOutput, scored: EngineOutput) -> TensorDict:
    """Columns of both calls, in the order of this rank's rows."""
    if not own.without:
        return learned.columns
    if not own.with_gradient:
        return scored.columns
    columns = {
        str(name): own.batch.restore(
            [*own.with_gradient, *own.without], [learned.columns[name].values(), scored.columns[name].values()]
        )
        for name in learned.columns.keys()  # noqa: SIM118 - a TensorDict iterates rows
    }
    return TensorDict(columns, batch_size=[own.batch.num_rows])  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """This rank's rows, by whether they have a gradient."""

    batch: RowBatch
    with_gradient: list[int]
    without: list[int]


def _split(data: TensorDict, loss: LossFunction) -> _Rows | None:
    """This rank's rows apart; None if they cannot be separated."""
    try:
        has_gradient: Tensor | None = loss.has_gradient(data)  # pyright: ignore[reportFunctionMemberAccess]
        if has_gradient is None or PAIR in data.keys():  # noqa: SIM118 - a TensorDict; pairs are not cut apart
            return None
        device = data["completion_token_ids"].device
        batch = RowBatch(data, needs_mask=True, device=torch.device(device))
        flags: list[bool] = has_gradient.tolist()
    except Exception:  # noqa: BLE001 - whatever is wrong with the rows, the call over all of them reports it
        return None
    rows = range(batch.num_rows)
    return _Rows(
        batch=batch,
        with_gradient=[row for row in rows if flags[row]],
        without=[row for row in rows if not flags[row]],
    )
