"""Engine workers: one rank of actor, reference, critic or teacher, which reads and writes columns of the queue."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import rl_ckpt.registry
import rl_engine.registry
import rl_tq.registry
from rl_ckpt.errors import SyncAbortedError
from rl_engine.errors import ConfigError, naming
from rl_trainer.algorithms import (
    AdvantageInput,
    PolicyLossFunction,
    compute_advantages,
    estimator_named,
    loss_named,
)
from rl_trainer.algorithms.advantages import BatchRanks, value_scan
from rl_trainer.algorithms.distillation import teacher_columns
from rl_trainer.algorithms.kl_controller import estimate_kl
from rl_trainer.algorithms.rollout_correction import configured_weights, drop_rejected, finished_metrics
from rl_trainer.algorithms.selection import beyond_moment, high_entropy, select_tokens
from rl_trainer.config.schema import ADAPTER
from rl_trainer.errors import InputError, TrainerError
from rl_trainer.metrics import peak_flops
from rl_trainer.plugins import stage_named
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.runtime.network import has_votes
from rl_trainer.runtime.tracing import span
from rl_trainer.workers.columns import GIVEN, TEACHER_PROMPT, TRUNCATED
from rl_trainer.workers.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from rl_ckpt.base import ShardSender, WeightSender
    from rl_ckpt.types import SyncReport
    from rl_engine.base import LossFunction
    from rl_engine.types import EngineConfig, ShardSpec
    from rl_rollout.types import TensorPart
    from rl_tq.types import BatchMeta
    from rl_trainer.algorithms.advantages import Need
    from rl_trainer.algorithms.critic_losses import ProcessRewardLoss
    from rl_trainer.config import AlgorithmConfig, TeacherSection

_PROMPT = "prompt_token_ids"
_TOKENS = (_PROMPT, "completion_token_ids", "loss_mask")
_READ: tuple[Need, ...] = ("values", "greedy_rewards", "sum_pi_squared", "process_rewards", "components")
"""Needs of estimators that are columns of the queue."""
_OLD_ENTROPY = "old_entropy"
_OLD = {"recompute": "old_logprobs", "rollout": "rollout_logprobs"}
"""Column of the policy before the update, by `algorithm.old_logprobs`."""


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


class _EngineRank:
    """Base of engine workers: an `rl_engine.Engine` that reads columns of the queue and writes columns back.

    All ranks make the same calls in the same order. `inputs` names columns that the model is fed beside the tokens.
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
        self._inputs, self._timeout_s = (*_TOKENS, *inputs), timeout_s
        self._queue = rl_tq.registry.connect(queue_address, timeout_s=timeout_s)
        self._engine = rl_engine.registry.create_engine(backend, config)
        self._engine.initialize()

    def _forward(
        self,
        batch: BatchMeta,
        columns: Mapping[str, str],
        *,
        prompt: str = _PROMPT,
        writes: bool = True,
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
        """Columns of a mini-batch; with `algorithm.mask_truncated` the tokens of cut-off rows are nobody's."""
        data = self._read(batch, columns)
        if self._masks_truncated:
            mask = data["loss_mask"]
            values = mask.values() * _whole(batch, mask.offsets())
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
            num_tokens = sum(data[name].values().numel() for name in _TOKENS[:2])
            spent = num_tokens * self._flops_per_token
            metrics = {**metrics, "mfu": spent / (time.perf_counter() - start) / self._flops_per_s}
        return UpdateReport(metrics=metrics, grad_norm=grad_norm, lr=lr)

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


class CriticWorker(_EngineRank):
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
        if wrong := [value for value in outcomes.tolist() if not 0 <= value <= 1]:
            raise TrainerError(
                f"a completion has the reward {wrong[0]:g}, and advantage=prime learns outcomes from 0 to 1; scale the "
                "rewards, or choose another algorithm.advantage"
            )
        with self._engine.eval_mode(), span("forward"):
            output = self._engine.forward_backward_batch(data, None, forward_only=True)
        ref = data["ref_logprobs"]
        rewards = self._loss.beta * (output.columns["logprobs"].values() - ref.values())
        jagged = torch.nested.nested_tensor_from_jagged(rewards, ref.offsets())
        return self._put(batch, {"process_rewards": jagged})


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Weights that one rank of an engine holds, to be sent."""

    specs: list[ShardSpec]
    dtypes: dict[str, str]
    """Dtype in which each tensor is sent, by name: `bfloat16`."""
    host: str
    """Host of the rank."""


class EngineWorker(_EngineRank):
    """Policy worker: one rank of the actor, the reference or the teacher."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        backend: str,
        config: EngineConfig,
        algorithm: AlgorithmConfig,
        has_old_pass: bool = True,
        has_given: bool = False,
        teacher: TeacherSection | None = None,
        max_new_tokens: int = 1,
        queue_address: str,
        inputs: Sequence[str] = (),
        flops_per_token: float | None = None,
        weights_address: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(
            context,
            backend=backend,
            config=config,
            inputs=inputs,
            masks_truncated=algorithm.mask_truncated,
            flops_per_token=flops_per_token,
            queue_address=queue_address,
            timeout_s=timeout_s,
        )
        self._algorithm, self._has_given = algorithm, has_given
        has_old = has_old_pass or algorithm.old_logprobs == "rollout"
        self._has_adapter = config.lora is not None
        self._teacher = teacher
        self._loss = PolicyLossFunction(
            config=algorithm, teacher=teacher, has_old_logprobs=has_old, max_new_tokens=max_new_tokens
        )
        self._loop = LoopThread("weights")
        self._senders: dict[str, WeightSender] = {}
        self._shards: ShardSender | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._weights_address = weights_address if context.rank == 0 else None

    @register(Dispatch.SPLIT)
    def compute_log_prob(self, batch: BatchMeta, column: str = "old_logprobs") -> BatchMeta:
        """Write `column`: the log-probs of every completion token under the engine's weights.

        Where the estimator reads it, also `sum_pi_squared` of the policy before the update, and with
        `algorithm.top_entropy` its entropy.
        """
        columns = {"logprobs": column}
        if column == "old_logprobs" and "sum_pi_squared" in estimator_named(self._algorithm.advantage).needs:
            columns["sum_pi_squared"] = "sum_pi_squared"
        if column == "old_logprobs" and self._algorithm.top_entropy < 1:
            columns["entropy"] = _OLD_ENTROPY
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

        Args:
            batch: A row or more for each rank.
            writes: Flag of each row: whether its columns are written, all of a rank's or none. None: they all are.
        """
        assert self._teacher is not None, "it is asked of the teacher alone"
        prompt = _PROMPT if self._teacher.context is None else TEACHER_PROMPT
        return self._forward(batch, teacher_columns(self._teacher), prompt=prompt, writes=writes is None or all(writes))

    @register(Dispatch.SPLIT)
    def compute_stage(self, batch: BatchMeta, name: str) -> BatchMeta:
        """Write the columns of a user's stage (`algorithm.stages`).

        Raises:
            TrainerError: it gave no columns.
        """
        stage = stage_named(name)
        made = stage.compute(self._read(batch, stage.reads))
        if not isinstance(made, Mapping) or not made:  # pyright: ignore[reportUnnecessaryIsInstance] - a plug-in
            raise TrainerError(f"algorithm.stages: {name} gave {made!r:.80}; columns by name are needed")
        return self._put(batch, made)

    @register(Dispatch.SPLIT_GROUPS)
    def compute_advantage(self, batch: BatchMeta, kl_coef: float, seed: int) -> AdvantageReport:
        """Write `advantages` and the columns that critic or loss read beside them. Collective; ranks hold whole groups.

        A rank reads the columns of its own groups; whole-batch statistics are reduced over the ranks as moments.

        Args:
            batch: Scored rows of one training step.
            kl_coef: Coefficient of the KL to the reference in the rewards; only with `algorithm.kl_in_reward`.
            seed: Seeds the choice of tokens of Clip-Cov and KL-Cov.
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
        config, estimator = self._algorithm, estimator_named(self._algorithm.advantage)
        needs = estimator.needs
        is_weighted = estimator.uses_weights and config.correction != "none" and config.old_logprobs == "recompute"
        has_kl = config.kl_in_reward and config.kl_coef > 0
        loss = loss_named(config.loss)
        has_policy = has_kl or "ratio" in needs or "logprobs" in needs or loss.selects_tokens
        columns = ["rewards", "loss_mask", "group_id", "rollout_index"]
        columns += [_OLD[config.old_logprobs]] if has_policy else []
        columns += ["rollout_logprobs"] if "ratio" in needs or is_weighted or loss.selects_tokens else []
        columns += [_OLD_ENTROPY] if config.top_entropy < 1 else []
        columns += ["ref_logprobs"] if has_kl else []
        columns += [name for name in _READ if name in needs]
        columns += ["component_weights"] if "components" in needs else []
        data = self._read(batch, (*columns, *estimator.reads))
        offsets, mask, rewards = data["rewards"].offsets(), data["loss_mask"].values(), data["rewards"].values()
        old = data[_OLD[config.old_logprobs]].values() if has_policy else None
        reward_kl = None
        if has_kl:
            assert old is not None
            kl = torch.where(mask.bool(), estimate_kl(old, data["ref_logprobs"].values(), config.kl_estimator), 0.0)
            total, num = ranks.sum(torch.stack([kl.double().sum(), mask.double().sum()])).tolist()
            reward_kl = total / max(num, 1)
            rewards = rewards - kl_coef * kl
        inputs = AdvantageInput(
            rewards=rewards,
            loss_mask=mask,
            cu_seqlens=offsets.to(torch.int64),
            group_ids=data["group_id"],
            rollout_ids=data["rollout_index"],
            gamma=config.gamma,
            lam=config.lam,
            options=config.advantage_options,
            logprobs=old,
            values=data["values"].values() if "values" in needs else None,
            sum_pi_squared=data["sum_pi_squared"].values() if "sum_pi_squared" in needs else None,
            greedy_rewards=data["greedy_rewards"] if "greedy_rewards" in needs else None,
            process_rewards=data["process_rewards"].values() if "process_rewards" in needs else None,
            components=data["components"] if "components" in needs else None,
            component_weights=data["component_weights"][0] if "components" in needs else None,
            weights=configured_weights(config, old, data["rollout_logprobs"].values(), mask, offsets.to(torch.int64))
            if old is not None and is_weighted
            else None,
            ratio=(old - data["rollout_logprobs"].values()).exp() if old is not None and "ratio" in needs else None,
            columns={name: _column(name, data[name]) for name in estimator.reads},
            ranks=ranks,
        )
        written = {"advantages": compute_advantages(config.advantage, inputs)}
        if "values" in needs:
            written["returns"] = value_scan(inputs, "vtrace" if "ratio" in needs else "gae").returns
        learned = mask * _whole(batch, offsets) if config.mask_truncated else mask
        if loss.selects_tokens:
            assert old is not None
            options, kind = {**loss.options, **config.loss_options}, cast("Any", config.loss)
            chosen: dict[str, Any] = {"advantages": written["advantages"], "loss_mask": learned, "ranks": ranks}
            if "m2_max" in options:
                log_ratio = old - data["rollout_logprobs"].values()
                written["selected"] = beyond_moment(log_ratio, **chosen, m2_max=options["m2_max"])
            else:
                bounds: dict[str, Any] = {name: options[name] for name in ("share", "low", "high") if name in options}
                written["selected"] = select_tokens(old, **chosen, loss=kind, seed=seed, **bounds)
        if config.top_entropy < 1:
            entropy = data[_OLD_ENTROPY].values()
            written["is_high_entropy"] = high_entropy(entropy, learned, share=config.top_entropy, ranks=ranks)
        jagged = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in written.items()}
        return AdvantageReport(batch=self._put(batch, jagged), reward_kl=reward_kl)

    @register(Dispatch.SPLIT_REDUCED)
    def update_actor(self, batch: BatchMeta, entropy_coef: float | None = None) -> UpdateReport:
        """Take one optimizer step on a mini-batch.

        Args:
            batch: Its rows.
            entropy_coef: Weight of the entropy bonus; None: that of the configuration.
        """
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

        Args:
            version: Of the weights.
            num_receivers: Receivers of the session.
            address: Of the session; None: the one that the actor was created with.

        Raises:
            SyncAbortedError: it failed on either side, or was called off.
        """
        named_tensors, adapter = self._engine.get_per_tensor_param()
        if adapter is not None:
            named_tensors = ((f"adapters.{ADAPTER}.{name}", tensor) for name, tensor in named_tensors)
        if self._weights_address is not None:
            address = address or self._weights_address
            if address not in self._senders:
                self._senders[address] = rl_ckpt.registry.connect(address, role="send", timeout_s=self._timeout_s)
            try:
                return self._loop.run(self._send(address, named_tensors, version, num_receivers), self._timeout_s)
            except CancelledError as error:
                for _ in self._engine.get_per_tensor_param()[0]:  # the other ranks gather meanwhile
                    pass
                raise SyncAbortedError(f"the sync of version {version} was called off") from error
        for _ in named_tensors:  # the gather is collective
            pass
        return None

    async def _send(
        self, address: str, named_tensors: Iterable[tuple[str, Tensor]], version: int, num_receivers: int
    ) -> SyncReport:
        def begun() -> Iterator[tuple[str, Tensor]]:
            self._waiting = None
            yield from named_tensors

        self._waiting = asyncio.current_task()
        try:
            num_peers = num_receivers if has_votes(address) else None  # a folder knows no readers
            return await self._senders[address].send_weights(begun(), version=version, num_peers=num_peers)
        finally:
            self._waiting = None

    @register(Dispatch.GATHER)
    def weight_layout(self) -> list[LocalWeights | None]:
        """Weights that this rank holds; None if its engine exports whole tensors only."""
        held = LocalWeights([], {}, self._context.host)
        try:
            for spec, tensor in self._engine.get_local_shards():
                held.specs.append(spec)
                held.dtypes[spec.name] = str(tensor.dtype).removeprefix("torch.")
        except ConfigError:
            return [None]
        return [held]

    @register(Dispatch.GATHER)
    def open_sessions(
        self, layouts: tuple[Sequence[ShardSpec], ...], targets: list[list[TensorPart]] | None, address: str
    ) -> list[dict[int, str]]:
        """Open a session to each rank of a replica that this rank has slices for, in the place of earlier ones.

        Returns where each is reached.

        Args:
            layouts: Shards that every rank of the engine holds.
            targets: Slices that every rank of a replica takes; None: its one rank takes all.
            address: Pattern of a session's address, with `{rank}`, `{target}` and `{host}`.
        """
        rank, host = self._context.rank, self._context.host
        if self._shards is not None:
            self._loop.run(self._shards.close(), self._timeout_s)
        self._shards = rl_ckpt.registry.create_sender(
            layouts,
            targets,
            rank,
            lambda target: address.format(rank=rank, target=target, host=host),
            timeout_s=self._timeout_s,
        )
        return [self._loop.run(self._shards.prepare(), self._timeout_s)]

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
        assert self._shards is not None, "sessions are opened first"
        count = num_replicas if isinstance(num_replicas, int) else num_replicas[self._context.rank]
        try:
            return [self._loop.run(self._stage(self._shards, version, count), self._timeout_s)]
        except CancelledError as error:
            raise SyncAbortedError(f"the sync of version {version} was called off") from error

    async def _stage(
        self, shards: ShardSender, version: int, num_replicas: int | Mapping[int, int]
    ) -> Mapping[str, object]:
        self._waiting = asyncio.current_task()
        try:
            return await shards.stage(self._engine.get_local_shards, version=version, num_replicas=num_replicas)
        finally:
            self._waiting = None

    @register(Dispatch.RANK_ZERO)
    def join_digest(self, shares: Sequence[Mapping[str, object]]) -> int:
        """Digest of the whole model, of what `stage_weights` returned on every rank."""
        assert self._shards is not None, "a version is staged first"
        return self._shards.join_digest(shares)

    @register(Dispatch.GATHER)
    def commit_weights(self, version: int, digest: int) -> list[SyncReport]:
        """Commit the staged version, given the digest over the whole model; every rank has staged it."""
        assert self._shards is not None, "a version is staged first"
        return [self._loop.run(self._shards.commit(digest, version), self._timeout_s)]

    @register(Dispatch.ONE_TO_ALL)
    def abort_weights(self, why: str) -> None:
        """Abort the staged version, if there is one."""
        assert self._shards is not None, "a version is staged first"
        self._loop.run(self._shards.abort(why), self._timeout_s)

    @register(Dispatch.ONE_TO_ALL, is_urgent=True)
    def call_off(self) -> None:
        """Abort a sync that waits for receivers. One that sends already notices lost receivers itself."""
        if self._waiting is not None:
            self._loop.cancel(self._waiting)

    @register(Dispatch.ONE_TO_ALL)
    def dismiss_receivers(self, why: str) -> None:
        """Tell receivers that have come for a sync since it failed that none begins."""
        senders = [sender for sender in (*self._senders.values(), self._shards) if sender is not None]
        for sender in senders:
            self._loop.run(sender.dismiss(why), self._timeout_s)

    def close(self) -> None:
        """Close every session and free the model."""
        for sender in (*self._senders.values(), self._shards):
            if sender is not None:
                self._loop.run(sender.close(), 30.0)
        self._senders, self._shards = {}, None
        self._loop.close()
        super().close()


def _peak() -> float | None:
    """Operations per second of this process's GPU; None without one, or where its peak is not known."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _column(name: str, values: Tensor) -> Tensor:
    """Values of a column as estimators get them: (T,) where it is aligned with the completions."""
    return values.values() if values.is_nested and name != _PROMPT else values


def _whole(batch: BatchMeta, offsets: Tensor) -> Tensor:
    """(T,) int64, 1 at the tokens of the rows that were not cut off."""
    whole = torch.tensor([tags["finish_reason"] not in TRUNCATED for tags in batch.tags], dtype=torch.int64)
    return whole.to(offsets.device).repeat_interleave(offsets.diff())


def _all_reduce(values: Tensor) -> Tensor:
    """All-reduce (sum) over the engine's process group."""
    summed = values.cuda() if torch.distributed.get_backend() == "nccl" else values.clone()
    torch.distributed.all_reduce(summed)
    return summed.to(values.device)


class ReferenceWorker(EngineWorker):
    """Reference worker of `algorithm.ref_ema`: one rank of a frozen engine whose weights are replaced by averages."""

    def __init__(self, context: WorkerContext, *, backend: str, config: EngineConfig, **rest: Any) -> None:
        super().__init__(context, backend=backend, config=config, **rest)
        self._backend, self._config = backend, config

    @register(Dispatch.RANK_ZERO)
    def average(self, policy: str, into: str, decay: float) -> None:
        """Write folder `into`: `average_folders` of this reference's weights and those in `policy`."""
        average_folders(Path(self._config.model_path), Path(policy), Path(into), decay)

    @register(Dispatch.ONE_TO_ALL)
    def load_model(self, path: str) -> None:
        """Load the weights of a folder."""
        self._engine.close()
        self._config = replace(self._config, model_path=path)
        self._engine = rl_engine.registry.create_engine(self._backend, self._config)
        self._engine.initialize()


def average_folders(reference: Path, policy: Path, into: Path, decay: float) -> None:
    """Write a model folder with `decay * reference + (1 - decay) * policy`, in float32.

    In bfloat16 a small step would be rounded away. What is no float is the policy's, and so is the rest of the folder.

    Args:
        reference: A Hugging Face folder of safetensors files.
        policy: Another of the same model; which tensors there are goes by it.
        into: Made anew.
        decay: 0 copies the policy.

    Raises:
        InputError: the reference lacks a tensor.
    """
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(policy, into, ignore=shutil.ignore_patterns("*.safetensors"))
    places = {name: file for file in reference.glob("*.safetensors") for name in _names(file)}
    for file in policy.glob("*.safetensors"):
        averaged: dict[str, torch.Tensor] = {}
        with safe_open(file, "pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118 - a file, not a mapping
                if name not in places:
                    raise InputError(f"the reference in {reference} has no tensor {name!r}, which the policy has")
                with safe_open(places[name], "pt") as own:
                    averaged[name] = _between(own.get_tensor(name), theirs.get_tensor(name), decay)
        with naming(into / file.name):
            save_file(averaged, into / file.name, metadata={"format": "pt"})


def _between(own: torch.Tensor, policy: torch.Tensor, decay: float) -> torch.Tensor:
    if not policy.is_floating_point():
        return policy
    return torch.lerp(policy.float(), own.float(), decay)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
