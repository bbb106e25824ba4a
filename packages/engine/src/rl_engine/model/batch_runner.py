"""Runner of batches: plans with all ranks, runs the micro-batches, adds up their shares."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl_engine.base import is_token_local
from rl_engine.batch.micro_batches import check_budget
from rl_engine.batch.plan import (
    ASKED,
    AUX_LOSS,
    COLUMNS,
    MTP_LOSS,
    BatchPlan,
    MicroBatchResults,
    add_up,
    columns_of,
    plan_batch,
    work_of,
)
from rl_engine.batch.row_batch import ADAPTER, VISUAL, RowBatch
from rl_engine.errors import BatchError, ConfigError
from rl_engine.layers.logprobs import HeadLoss
from rl_engine.layers.moe import ExpertLoad, check_replay, counts_of_column
from rl_engine.model.activations import offload_activations
from rl_engine.model.scorer import reshard
from rl_engine.model.settings import check_columns, check_lengths
from rl_engine.types import EngineOutput, Head

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tensordict import TensorDict

    from rl_engine.base import LossFunction
    from rl_engine.model.scorer import BuiltModel
    from rl_engine.types import ModelOutput


class BatchRunner:
    """Runner of batches on one model. Collective."""

    def __init__(self, built: BuiltModel) -> None:
        self._built = built

    def forward_backward(
        self, data: TensorDict, loss_function: LossFunction | None, *, has_backward: bool
    ) -> EngineOutput:
        """See `Engine.forward_backward_batch`."""
        built = self._built
        config, world, scorer = built.config, built.world, built.scorer

        make = partial(self._read, needs_mask=loss_function is not None)
        plan = plan_batch(
            world, built.replicas, data, make, self._budget, built.cost, work_of(loss_function, has_backward)
        )
        if scorer.multimodal is not None:
            scorer.multimodal.num_passes = max(world.exchange(scorer.multimodal.passes_for(plan.batch)))
            scorer.multimodal.place(plan.batch)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(config.matmul_precision)
        try:
            with world.together(), torch.set_grad_enabled(has_backward):
                results = self.run(plan, loss_function, self._expert_load(plan) if has_backward else None)
        finally:
            torch.set_float32_matmul_precision(before)
            reshard(scorer)  # a forward pass alone leaves gathered weights in the place of the trained ones
        shares = results.metric_values(is_leader=world.rank in built.replicas.leaders)
        metrics = add_up(world, shares) if loss_function is not None else {}
        place = data.get("completion_token_ids").device
        columns = columns_of(world, plan, results, place, "logprobs" if config.head == Head.LM else "values")
        return EngineOutput(columns=columns, metrics=metrics, num_micro_batches=plan.num_micro_batches)

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch."""
        config = self._built.config
        return config.max_tokens_per_gpu * config.parallel.sp * config.parallel.cp

    def check(self, data: TensorDict) -> None:
        """See `Engine.check_batch`."""
        batch = self._read(data, needs_mask=True)
        check_budget(batch.tokens(), batch.units(), self._budget)

    def _read(self, rows: TensorDict, *, needs_mask: bool) -> RowBatch:
        """Rows taken apart.

        Raises:
            BatchError: the model does not take them.
        """
        built, scorer = self._built, self._built.scorer
        batch = RowBatch(
            rows,
            needs_mask=needs_mask,
            device=built.world.device,
            feeds_last=built.config.head == Head.REWARD,
            shares_prefixes=scorer.shares_prefixes and ADAPTER not in rows.keys(),  # noqa: SIM118 - a TensorDict iterates rows
        )
        self._check_fit(batch)
        return batch

    def _check_fit(self, batch: RowBatch) -> None:
        scorer = self._built.scorer
        check_lengths(batch.lengths, scorer.config)
        check_columns(batch, scorer.config.vocab_size, self._built.config.head)
        if scorer.multimodal is not None:
            scorer.multimodal.check(batch)
        else:
            for name in VISUAL:
                if batch.has(name):
                    raise BatchError(f"The batch has {name} and the model takes no images in that way. Drop it.")
        check_replay(batch, scorer.experts)

    def run(
        self,
        plan: BatchPlan,
        loss_function: LossFunction | None,
        load: ExpertLoad | None = None,
        counts: Tensor | None = None,
    ) -> MicroBatchResults:
        """Run all micro-batches, forward and, where gradients are enabled and there is a loss, backward. Collective.

        Args:
            plan: The batch. A rank that has fewer micro-batches runs one-token dummies, so that collectives match.
            loss_function: None computes scores only.
            load: Load of the experts, where their auxiliary loss is wanted.
            counts: (L, E) float64, to which the load of this rank's experts is added.
        """
        scorer = self._built.scorer
        results = MicroBatchResults(fields=COLUMNS | ASKED if plan.batch.has(ADAPTER) else COLUMNS)
        for index in range(plan.num_micro_batches):
            packed, is_idle, mtp = plan.pack(index), plan.is_idle(index), scorer.mtp
            if mtp is not None:
                mtp.mask = plan.mask(index)
            routing = scorer.route(packed, None if is_idle else load, is_counting=counts is not None)
            if is_idle:
                idle: ModelOutput = scorer(packed)
                if torch.is_grad_enabled():
                    ahead = 0.0 if mtp is None or mtp.share is None else mtp.share
                    ((idle.scores.sum() + ahead) * 0.0).backward()
                continue
            with self.activations():
                output, shares = score_rows(plan, index, loss_function, partial(scorer, packed))
            if counts is not None:
                assert routing is not None
                routing.add_counts(counts)
            if torch.is_grad_enabled():
                share, loss = None if routing is None else routing.aux_share(), shares["loss"]
                if load is not None and share is not None:
                    shares[AUX_LOSS] = share
                    loss = loss + load.coef * share
                if mtp is not None and mtp.share is not None:
                    shares[MTP_LOSS], loss = mtp.share, loss + mtp.share
                loss.backward()
            results.add(plan.micro_batches[index], output, shares)
        return results

    def activations(self) -> AbstractContextManager[None]:
        """Context of a differentiated forward pass: decides where saved activations are stored."""
        is_offloaded = self._built.config.activation_offload is True and torch.is_grad_enabled()
        return offload_activations(self._built.world.device) if is_offloaded else nullcontext()

    def _expert_load(self, plan: BatchPlan) -> ExpertLoad | None:
        """Expert load of the whole batch: counted in `routed_experts`, or in a separate forward pass. Collective."""
        experts, coef = self._built.scorer.experts, self._built.config.router_aux_loss_coef
        if not coef or experts is None:
            return None
        if plan.own.routed_experts() is not None:
            counts = counts_of_column(plan.own, experts)
        else:
            device = self._built.world.device
            counts = torch.zeros(experts.num_layers, experts.num_experts, dtype=torch.float64, device=device)
            with torch.no_grad():
                self.run(plan, None, counts=counts)
        if self._built.world.size > 1:
            dist.all_reduce(counts)
        return ExpertLoad(counts=counts, coef=coef)


def score_rows(
    plan: BatchPlan,
    index: int,
    loss_function: LossFunction | None,
    score: Callable[[HeadLoss | None], ModelOutput],
) -> tuple[ModelOutput, dict[str, Tensor]]:
    """Micro-batch `index` scored by `score`, and its shares of the loss (under `loss`) and of the metrics.

    A token-local loss is made by the head, with its gradient, where there is to be one and the head can.
    """
    if loss_function is None:
        return score(None), {}
    columns = plan.batch.select(plan.micro_batches[index])
    head_loss = HeadLoss(lambda output: apply_loss(loss_function, output, columns))
    output = score(head_loss if torch.is_grad_enabled() and is_token_local(loss_function) else None)
    return output, head_loss.shares or apply_loss(loss_function, output, columns)


def apply_loss(loss_function: LossFunction, output: ModelOutput, columns: TensorDict) -> dict[str, Tensor]:
    """This micro-batch's share of the loss, under `loss`, and of the metrics.

    Raises:
        ConfigError: a metric takes the loss's name.
    """
    loss, shares = loss_function(output, columns)
    if "loss" in shares:
        raise ConfigError("A loss function's metrics may not be named 'loss'; the engine reports the loss itself.")
    return {"loss": loss, **shares}
