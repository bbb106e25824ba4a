"""One rank of a model engine, fed from the queue: the actor, and the reference."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

import rl_ckpt
import rl_engine
import rl_tq
from rl_trainer.algorithms import AdvantageInput, PolicyLossFunction, compute_advantages
from rl_trainer.base import Dispatch, WorkerContext, register
from rl_trainer.workers._loop_thread import LoopThread

if TYPE_CHECKING:
    from rl_ckpt.types import SyncReport
    from rl_engine.types import EngineConfig
    from rl_tq.types import BatchMeta
    from rl_trainer.config import AlgorithmConfig

_POLICY_COLUMNS = ("prompt_token_ids", "completion_token_ids", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimizer step did."""

    metrics: dict[str, float]
    """Loss, KL, clip fractions and so on, of the whole mini-batch."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the step."""


class EngineWorker:
    """Wraps an `rl_engine.Engine`: reads columns from the queue, computes, writes columns back. Ranks call in step."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        backend: str,
        config: EngineConfig,
        algorithm: AlgorithmConfig,
        queue_address: str,
        weights_address: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._context = context
        self._algorithm = algorithm
        self._timeout_s = timeout_s
        self._loss = PolicyLossFunction(config=algorithm)
        self._queue = rl_tq.connect(queue_address, timeout_s=timeout_s)
        self._engine = rl_engine.create_engine(backend, config)
        self._engine.initialize()
        self._lr = config.optimizer.lr if config.optimizer else 0.0
        self._loop = LoopThread("weights")
        self._sender = None
        if weights_address is not None and context.rank == 0:
            self._sender = rl_ckpt.connect(weights_address, role="send", timeout_s=timeout_s)
            self._loop.run(self._sender.prepare(), timeout_s)

    @register(Dispatch.SPLIT)
    def compute_log_prob(self, batch: BatchMeta, column: str = "old_logprobs") -> BatchMeta:
        """Write the log-probs of every completion token under the engine's weights as `column`."""
        data = self._queue.get(batch, _POLICY_COLUMNS)
        with self._engine.eval_mode():
            output = self._engine.forward_backward_batch(data, None, forward_only=True)
        return self._put(batch, {column: output.columns["logprobs"]})

    @register(Dispatch.RANK_ZERO)
    def compute_advantage(self, batch: BatchMeta) -> BatchMeta:
        """Write `advantages` from rewards and groups; needs the whole batch."""
        data = self._queue.get(batch, ("rewards", "loss_mask", "group_id"))
        rewards = data["rewards"]
        advantages = compute_advantages(
            self._algorithm.advantage,
            AdvantageInput(
                rewards=rewards.values(),
                loss_mask=data["loss_mask"].values(),
                cu_seqlens=rewards.offsets().to(torch.int64),
                group_ids=data["group_id"],
            ),
        )
        return self._put(batch, {"advantages": torch.nested.nested_tensor_from_jagged(advantages, rewards.offsets())})

    @register(Dispatch.SPLIT_REDUCED)
    def update_actor(self, batch: BatchMeta) -> UpdateReport:
        """One optimizer step on one mini-batch."""
        columns = [*_POLICY_COLUMNS, "advantages", "old_logprobs"]
        if self._algorithm.kl_coef > 0:
            columns.append("ref_logprobs")
        if self._algorithm.old_logprobs == "rollout":
            columns.remove("old_logprobs")
        data = self._queue.get(batch, [*columns, "rollout_logprobs"])
        if self._algorithm.old_logprobs == "rollout":
            data.rename_key_("rollout_logprobs", "old_logprobs")
        with self._engine.train_mode():
            self._engine.optimizer_zero_grad()
            output = self._engine.forward_backward_batch(data, self._loss)
            grad_norm = self._engine.optimizer_step()
            lr, self._lr = self._lr, self._engine.lr_scheduler_step()
        return UpdateReport(metrics=output.metrics, grad_norm=grad_norm, lr=lr)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, num_receivers: int) -> SyncReport | None:
        """Stream the weights to every server, once they all have joined. All ranks gather; rank 0 sends and reports."""
        named_tensors, _ = self._engine.get_per_tensor_param()
        if self._sender is not None:
            sending = self._sender.send_weights(named_tensors, version=version, num_peers=num_receivers)
            return self._loop.run(sending, self._timeout_s)
        for _ in named_tensors:  # the gather is collective
            pass
        return None

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int) -> float:
        """Write a resumable checkpoint; returns the seconds it took."""
        start = time.perf_counter()
        self._engine.save_checkpoint(path, step)
        return time.perf_counter() - start

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Restore a checkpoint and return its step."""
        return self._engine.load_checkpoint(path)

    @register(Dispatch.ONE_TO_ALL)
    def save_model(self, path: str) -> None:
        """Write an ordinary Hugging Face folder."""
        self._engine.save_model(Path(path))

    def _put(self, batch: BatchMeta, columns: dict[str, Any]) -> BatchMeta:
        data = TensorDict(columns, batch_size=[len(batch)])
        return self._queue.put(data, partition=batch.partition, sample_ids=batch.sample_ids)

    def close(self) -> None:
        """Leave every session and free the model."""
        if self._sender is not None:
            self._loop.run(self._sender.close(), 30.0)
            self._sender = None
        self._loop.close()
        self._engine.close()
        self._queue.close()
