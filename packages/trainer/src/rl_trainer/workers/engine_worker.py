"""Engine workers: one rank of actor, reference or teacher, and their base, which critics have too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import rl_engine.registry
import rl_tq.registry
from rl_trainer.algorithms import PolicyLossFunction, estimator_named, loss_named
from rl_trainer.algorithms.advantages import BatchRanks
from rl_trainer.algorithms.distillation import teacher_columns
from rl_trainer.algorithms.rollout_correction import drop_rejected, finished_metrics
from rl_trainer.errors import TrainerError
from rl_trainer.metrics import peak_flops
from rl_trainer.plugins import stage_named
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.runtime.profiling import profile_process
from rl_trainer.runtime.tracing import span
from rl_trainer.workers.advantages import OLD_ENTROPY, advantage_columns, batch_advantages
from rl_trainer.workers.columns import GIVEN, TEACHER_PROMPT, TRUNCATED, rows_of
from rl_trainer.workers.weights import LocalWeights, WeightSessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from rl_ckpt.types import SyncReport
    from rl_engine.base import LossFunction
    from rl_engine.types import EngineConfig, ShardSpec
    from rl_rollout.types import TensorPart
    from rl_tq.types import BatchMeta
    from rl_trainer.config.schema import AlgorithmConfig, TeacherSection

_PROMPT = "prompt_token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Report of one optimizer step."""

    metrics: dict[str, float]
    """Loss, KL, clip fractions and so on, of the whole mini-batch."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageReport:
    """Report of a batch's advantages."""

    batch: BatchMeta
    """The columns that were written."""
    reward_kl: float | None = None
    """Mean KL per token of the whole batch that was taken off the rewards; None with the KL elsewhere."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.batch)

    @classmethod
    def concat(cls, parts: Sequence[AdvantageReport]) -> AdvantageReport:
        """Concatenate the reports of ranks."""
        return replace(parts[0], batch=type(parts[0].batch).concat([part.batch for part in parts]))


class EngineRank:
    """Base of engine workers: one rank of an `rl_engine.Engine`, which reads columns of the queue and writes others.

    All ranks make the same calls in the same order. `inputs` names columns that the model is fed in addition to the
    tokens.
    """

    _flops_per_token: float | None = None
    """Floating-point operations that learning from a token takes of this rank."""
    _flops_per_s: float | None = None
    """Peak of its GPU, where that is known."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        backend: str,
        config: EngineConfig,
        queue_address: str,
        inputs: Sequence[str] = (),
        masks_truncated: bool = False,
        flops_per_token: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._flops_per_token, self._flops_per_s = flops_per_token, _peak()
        self._context, self._masks_truncated = context, masks_truncated
        self._queue = rl_tq.registry.connect(queue_address, timeout_s=timeout_s)
        self._engine = rl_engine.registry.create_engine(backend, config)
        self._inputs, self._timeout_s = (*self._engine.batch_columns, *inputs), timeout_s
        self._engine.initialize()

    def _forward(
        self, batch: BatchMeta, columns: Mapping[str, str], *, prompt: str = _PROMPT, writes: bool = True
    ) -> BatchMeta:
        """Run a forward pass and write its outputs; `columns` has the column by output, `prompt` that of prompts."""
        data = self._queue.get(batch, [prompt if name == _PROMPT else name for name in self._inputs])
        if prompt != _PROMPT:
            data.rename_key_(prompt, _PROMPT)
        with self._engine.eval_mode(), span("forward"):
            outputs = self._engine.forward_backward_batch(data, None, forward_only=True)
        if not writes:
            return batch.reorder([])
        return self._put(batch, {column: outputs.columns[output] for output, column in columns.items()})

    def _read(self, batch: BatchMeta, names: Iterable[str]) -> TensorDict:
        """Columns of rows by name; the name of a tag that is a number, such as `num_tokens`, is one too: (B,)."""
        wanted, tags = [*dict.fromkeys(names)], batch.tags[0] if batch.tags else {}
        tagged = [name for name in wanted if name not in batch.columns and isinstance(tags.get(name), int | float)]
        data = self._queue.get(batch, [name for name in wanted if name not in tagged])
        for name in tagged:
            data[name] = torch.tensor([tag[name] for tag in batch.tags])
        return data

    def _learnable(self, batch: BatchMeta, columns: Iterable[str]) -> TensorDict:
        """Columns of a mini-batch; with `algorithm.mask_truncated` the tokens of cut-off rows are not learned."""
        data = self._read(batch, columns)
        if self._masks_truncated:
            mask = data["loss_mask"]
            values = mask.values() * whole_rows(batch, mask.offsets())
            data["loss_mask"] = torch.nested.nested_tensor_from_jagged(values, mask.offsets())
        return data

    def _update(self, data: TensorDict, loss: LossFunction) -> UpdateReport:
        with self._engine.train_mode():
            start = time.perf_counter()
            self._engine.optimizer_zero_grad()
            with span("forward_backward"):
                output = self._engine.forward_backward_batch(data, loss)
            with span("optimizer_step"):
                grad_norm = self._engine.optimizer_step()
            lr = self._engine.learning_rate()
            self._engine.lr_scheduler_step()
        metrics = output.metrics
        if self._flops_per_token is not None and self._flops_per_s is not None:  # the norm has waited for the device
            num_tokens = sum(data[name].values().numel() for name in (_PROMPT, "completion_token_ids"))
            spent = num_tokens * self._flops_per_token
            metrics = {**metrics, "mfu": spent / (time.perf_counter() - start) / self._flops_per_s}
        return UpdateReport(metrics=metrics, grad_norm=grad_norm, lr=lr)

    @register(Dispatch.GATHER)
    def profile(self, tools: Sequence[str], stem: str) -> list[str]:
        """Start to record with tools, into files whose paths begin with `stem`; without tools stop.

        Returns:
            The files that were written.
        """
        return profile_process(tools, f"{stem}-{self._context.rank}")

    @register(Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Offload weights, gradients and optimizer to the CPU; a call that needs them onloads and offloads again."""
        self._engine.to("cpu")

    @register(Dispatch.ONE_TO_ALL)
    def offload_optimizer(self) -> None:
        """Offload the optimizer and drop the gradients: the weights alone stay, to be sent."""
        self._engine.optimizer_zero_grad()
        self._engine.to("cpu", model=False, grad=False)

    @register(Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Onload everything to the device."""
        self._engine.to("cuda" if torch.cuda.is_available() else "cpu")

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

    @register(Dispatch.ONE_TO_ALL)
    def finish(self) -> None:
        """Wait for a checkpoint that is still being written, raise what its writing raised, and free the model."""
        self._engine.close()

    def _put(self, batch: BatchMeta, columns: Mapping[str, Any]) -> BatchMeta:
        from tensordict import TensorDict  # two seconds, which the controller does not wait for

        data = TensorDict(dict(columns), batch_size=[len(batch)])
        return self._queue.put(data, partition=batch.partition, sample_ids=batch.sample_ids)

    def close(self) -> None:
        """Free the model and close the queue."""
        self._engine.close()
        self._queue.close()


class EngineWorker(EngineRank):
    """Policy worker: one rank of the actor, the reference or the teacher."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: EngineConfig,
        algorithm: AlgorithmConfig,
        has_old_pass: bool = True,
        has_given: bool = False,
        teacher: TeacherSection | None = None,
        max_new_tokens: int = 1,
        weights_address: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(context, config=config, masks_truncated=algorithm.mask_truncated, **rest)
        self._algorithm, self._has_given = algorithm, has_given
        has_old = has_old_pass or algorithm.old_logprobs == "rollout"
        self._has_adapter = config.lora is not None
        self._teacher = teacher
        self._loss = PolicyLossFunction(
            config=algorithm, teacher=teacher, has_old_logprobs=has_old, max_new_tokens=max_new_tokens
        )
        self._weights = WeightSessions(self._engine, context, weights_address, self._timeout_s)

    @register(Dispatch.SPLIT)
    def compute_log_prob(self, batch: BatchMeta, column: str = "old_logprobs") -> BatchMeta:
        """Write `column`: the log-probs of every completion token under the engine's weights.

        Where the estimator reads it, also `sum_pi_squared` of the policy before the update, and with
        `algorithm.top_entropy` its entropy.
        """
        columns = {"logprobs": column}
        if column == "old_logprobs" and "sum_pi_squared" in estimator_named(self._algorithm.advantage).reads:
            columns["sum_pi_squared"] = "sum_pi_squared"
        if column == "old_logprobs" and self._algorithm.top_entropy < 1:
            columns["entropy"] = OLD_ENTROPY
        if self._is_reference(column):
            with self._engine.adapter_off():
                return self._forward(batch, columns)
        return self._forward(batch, columns)

    def _is_reference(self, column: str) -> bool:
        """Whether log-probs are asked of the start policy, which an actor is without its adapter."""
        return column == "ref_logprobs" and self._has_adapter

    @register(Dispatch.SPLIT)
    def compute_teacher_log_prob(self, batch: BatchMeta, writes: list[bool] | None = None) -> BatchMeta:
        """Write the teacher's columns that the distillation loss reads; this engine holds the teacher.

        `writes` is a flag of each row, all of a rank's or none: whether its columns are written. None: they all are.
        """
        assert self._teacher is not None, "it is asked of the teacher alone"
        prompt = _PROMPT if self._teacher.context is None else TEACHER_PROMPT
        return self._forward(batch, teacher_columns(self._teacher), prompt=prompt, writes=writes is None or all(writes))

    @register(Dispatch.SPLIT)
    def compute_stage(self, batch: BatchMeta, name: str) -> BatchMeta:
        """Write the columns of a user's stage (`algorithm.stages`).

        Raises:
            TrainerError: it raised, or gave no columns; names the rows.
        """
        stage, rows = stage_named(name), rows_of(batch.tags)
        data = self._read(batch, stage.reads)
        try:
            made = stage.compute(data)
        except Exception as error:
            raise TrainerError(f"{rows}algorithm.stages: {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(made, Mapping) or not made:  # pyright: ignore[reportUnnecessaryIsInstance] - a plug-in
            raise TrainerError(f"{rows}algorithm.stages: {name} gave {made!r:.80}; columns by name are needed")
        return self._put(batch, made)

    @register(Dispatch.SPLIT_GROUPS)
    def compute_advantage(self, batch: BatchMeta, kl_coef: float, seed: int) -> AdvantageReport:
        """Write `advantages` and the other columns that critic or loss read. Collective; ranks hold whole groups.

        A rank reads the columns of its own groups; whole-batch statistics are reduced over the ranks as moments.

        `seed` is that of the choice of tokens of Clip-Cov and KL-Cov.
        """
        context = self._context
        if context.world_size == 1:
            return self._advantages(batch, kl_coef, seed, BatchRanks())
        ranks = BatchRanks(rank=context.rank, size=context.world_size, all_reduce=_all_reduce)
        return self._advantages(batch, kl_coef, seed, ranks)

    @register(Dispatch.RANK_ZERO)
    def compute_whole_advantage(self, batch: BatchMeta, kl_coef: float, seed: int) -> AdvantageReport:
        """Write advantages on rank 0, by an estimator that needs the whole batch (`Estimator.scope`)."""
        return self._advantages(batch, kl_coef, seed, BatchRanks())

    def _advantages(self, batch: BatchMeta, kl_coef: float, seed: int, ranks: BatchRanks) -> AdvantageReport:
        config = self._algorithm
        data = self._read(batch, advantage_columns(config))
        whole = whole_rows(batch, data["loss_mask"].offsets()) if config.mask_truncated else None
        written, reward_kl = batch_advantages(config, data, whole=whole, kl_coef=kl_coef, seed=seed, ranks=ranks)
        return AdvantageReport(batch=self._put(batch, written), reward_kl=reward_kl)

    @register(Dispatch.SPLIT_REDUCED)
    def update_actor(self, batch: BatchMeta, entropy_coef: float | None = None) -> UpdateReport:
        """Take one optimizer step on a mini-batch."""
        config = self._algorithm
        columns = [*self._inputs, "advantages", "rollout_logprobs"]
        columns += ["ref_logprobs"] if config.kl_coef > 0 and not config.kl_in_reward else []
        columns += ["old_logprobs"] if config.old_logprobs == "recompute" and self._loss.has_old_logprobs else []
        loss = loss_named(config.loss)
        columns += ["selected"] if loss.selects_tokens else []
        columns += loss.reads
        columns += teacher_columns(self._teacher).values() if self._teacher is not None else []
        columns += ["is_high_entropy"] if config.top_entropy < 1 else []
        columns += [GIVEN] if self._has_given else []
        data = self._learnable(batch, columns)
        if config.old_logprobs == "rollout":
            data.rename_key_("rollout_logprobs", "old_logprobs")
        drop_rejected(config, data)
        weighed = config if entropy_coef is None else replace(config, entropy_coef=entropy_coef)
        report = self._update(data, replace(self._loss, config=weighed))
        return replace(report, metrics=finished_metrics(report.metrics))

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int, num_receivers: int, address: str | None = None) -> SyncReport | None:
        """Send gathered weights to every server once all have joined: all ranks gather, rank 0 sends and reports.

        Without `address` by the session that the actor was created with.

        Raises:
            SyncAbortedError: it failed on either side, or was called off.
        """
        return self._weights.send(version, num_receivers, address)

    @register(Dispatch.GATHER)
    def weight_layout(self) -> list[LocalWeights | None]:
        """Weights that this rank holds; None if its engine exports whole tensors only."""
        return [self._weights.layout()]

    @register(Dispatch.GATHER)
    def open_sessions(
        self, layouts: tuple[Sequence[ShardSpec], ...], targets: list[list[TensorPart]] | None, address: str
    ) -> list[dict[int, str]]:
        """Open a session to each rank of a replica that this rank has slices for, in the place of earlier ones.

        Returns where each is reached.

        `targets` are the slices that every rank of a replica takes; None: its one rank takes all. The address is a
        pattern with `{rank}`, `{target}` and `{host}`.
        """
        return [self._weights.open(layouts, targets, address)]

    @register(Dispatch.GATHER)
    def stage_weights(
        self, version: int, num_replicas: int | Sequence[Mapping[int, int]]
    ) -> list[Mapping[str, object]]:
        """Send this rank's slices; returns its share of the digest once every receiver holds them.

        Nothing is committed before `commit_weights`. `num_replicas` is how many receivers each session waits for; or,
        by rank of the engine and of a replica, how many that one does.

        Raises:
            SyncAbortedError: it failed on either side, or was called off.
        """
        count = num_replicas if isinstance(num_replicas, int) else num_replicas[self._context.rank]
        return [self._weights.stage(version, count)]

    @register(Dispatch.RANK_ZERO)
    def join_digest(self, shares: Sequence[Mapping[str, object]]) -> int:
        """Digest of the whole model, of what `stage_weights` returned on every rank."""
        return self._weights.sharded.join_digest(shares)

    @register(Dispatch.GATHER)
    def commit_weights(self, version: int, digest: int) -> list[SyncReport]:
        """Commit the staged version, given the digest over the whole model; every rank has staged it."""
        return [self._weights.commit(version, digest)]

    @register(Dispatch.ONE_TO_ALL)
    def abort_weights(self, why: str) -> None:
        """Abort the staged version, if there is one."""
        self._weights.abort(why)

    @register(Dispatch.ONE_TO_ALL, is_urgent=True)
    def call_off(self) -> None:
        """Abort a sync that waits for receivers. One that sends already notices lost receivers itself."""
        self._weights.call_off()

    @register(Dispatch.ONE_TO_ALL)
    def dismiss_receivers(self, why: str) -> None:
        """Notify receivers that have come for a failed sync that none begins."""
        self._weights.dismiss(why)

    def close(self) -> None:
        """Close every session and free the model."""
        self._weights.close()
        super().close()


def _peak() -> float | None:
    """Operations per second of this process's GPU; None without one, or where its peak is not known."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def whole_rows(batch: BatchMeta, offsets: Tensor) -> Tensor:
    """(T,) int64, 1 at the tokens of the rows that were not cut off."""
    whole = torch.tensor([tags["finish_reason"] not in TRUNCATED for tags in batch.tags], dtype=torch.int64)
    return whole.to(offsets.device).repeat_interleave(offsets.diff())


def _all_reduce(values: Tensor) -> Tensor:
    """All-reduce (sum) over the engine's process group."""
    summed = values.cuda() if torch.distributed.get_backend() == "nccl" else values.clone()
    torch.distributed.all_reduce(summed)
    return summed.to(values.device)
