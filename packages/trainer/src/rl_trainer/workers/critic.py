"""Critic workers: one rank of a value function, or of PRIME's process reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_trainer.errors import TrainerError
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.runtime.tracing import span
from rl_trainer.workers.columns import rows_of
from rl_trainer.workers.engine_worker import EngineRank, UpdateReport

if TYPE_CHECKING:
    from rl_engine.base import LossFunction
    from rl_tq.types import BatchMeta
    from rl_trainer.algorithms.critic_losses import ProcessRewardLoss


class CriticWorker(EngineRank):
    """Critic worker: one rank of the value function, which learns by `loss`."""

    _reads = ("values", "returns")

    def __init__(self, context: WorkerContext, *, loss: LossFunction, **rest: Any) -> None:
        super().__init__(context, **rest)
        self._loss = loss

    @register(Dispatch.SPLIT)
    def compute_values(self, batch: BatchMeta) -> BatchMeta:
        """Write `values`: the value of the state before every completion token."""
        return self._forward(batch, {"values": "values"})

    @register(Dispatch.SPLIT_REDUCED)
    def update_critic(self, batch: BatchMeta) -> UpdateReport:
        """Take one optimizer step on a mini-batch."""
        return self._update(self._learnable(batch, (*self._inputs, *self._reads)), self._loss)


class ProcessRewardWorker(CriticWorker):
    """Process reward worker (PRIME): one rank of a model whose log-ratio to the start policy is a reward."""

    _reads = ("ref_logprobs", "rewards")
    _loss: ProcessRewardLoss

    @register(Dispatch.SPLIT)
    def compute_values(self, batch: BatchMeta) -> BatchMeta:
        """Write `process_rewards`: beta times the log-ratio of every completion token to `ref_logprobs`.

        Raises:
            TrainerError: a completion's reward is no outcome, so that the model could not learn it.
        """
        data = self._queue.get(batch, (*self._inputs, *self._reads))
        outcomes = torch.stack([row.sum() for row in data["rewards"].unbind()])
        for value, tag in zip(outcomes.tolist(), batch.tags, strict=True):
            if 0 <= value <= 1:
                continue
            raise TrainerError(
                f"{rows_of([tag])}a completion has the reward {value:g}, and advantage=prime learns outcomes from "
                "0 to 1; scale the rewards, or choose another algorithm.advantage"
            )
        with self._engine.eval_mode(), span("forward"):
            output = self._engine.forward_backward_batch(data, None, forward_only=True)
        ref = data["ref_logprobs"]
        rewards = self._loss.beta * (output.columns["logprobs"].values() - ref.values())
        jagged = torch.nested.nested_tensor_from_jagged(rewards, ref.offsets())
        return self._put(batch, {"process_rewards": jagged})
