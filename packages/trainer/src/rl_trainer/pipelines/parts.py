"""The parts of a job, placed: what every pipeline is composed of."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import rl_tq
from rl_engine.types import EngineConfig, Head, LoraConfig, MatmulPrecision, OptimizerConfig, Precision
from rl_rollout.types import ServerConfig
from rl_trainer.algorithms import estimator_named
from rl_trainer.algorithms.kl import AdaptiveKl
from rl_trainer.base import ResourcePool
from rl_trainer.checkpoints import queue_snapshot
from rl_trainer.data.prompts import make_prompts
from rl_trainer.errors import RolloutFailedError
from rl_trainer.metrics import HeldGroup
from rl_trainer.pipelines.fleets import AgentFleet, WeightSync
from rl_trainer.workers.agent import AgentWorker, Job
from rl_trainer.workers.columns import EXPERTS
from rl_trainer.workers.engine import CriticWorker, EngineWorker
from rl_trainer.workers.images import IMAGES, takes_images
from rl_trainer.workers.samples import SampleWorker
from rl_trainer.workers.services import QueueWorker, RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.types import ServerAddress
    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.base import Fleet, Runtime
    from rl_trainer.checkpoints import RunState
    from rl_trainer.config import Config
    from rl_trainer.data import Datasets, Order, Row
    from rl_trainer.data.order import StreamOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A full batch of rollouts and what it cost."""

    batch: BatchMeta
    """batch_size x group_size rows."""
    reward: float
    """Mean over all completions that were scored, those of dropped groups too."""
    failures: dict[str, int]
    """Failed rollouts per kind; their prompts were replaced by others."""
    dropped_groups: int
    """Groups without signal that were replaced (`batch.dynamic_sampling`)."""
    late_groups: int = 0
    """Groups thrown away because their weights had become too old (`staleness.policy`)."""
    position: int
    """Prompts taken from the data up to and including these."""
    groups: tuple[HeldGroup, ...] = ()
    """The groups in `batch`."""


class RolloutManager:
    """Turns prompts into a batch: splits them over the agent workers, and replaces groups that failed."""

    def __init__(
        self,
        agents: AgentFleet,
        rows: Sequence[Row] | StreamOrder,
        order: Order,
        config: Config,
        *,
        num_groups: int = 0,
    ) -> None:
        self._agents, self._rows, self.order, self._config = agents, rows, order, config
        self._num_groups = num_groups
        self._row_of: dict[int, int] = {}

    @property
    def position(self) -> int:
        """Prompts taken from the data so far."""
        return self.order.position

    @property
    def num_too_long(self) -> int:
        """Rows of a stream that were passed over so far because their prompts are too long."""
        return self.order.num_too_long

    def generate_sequences(self, partition: str, step: int) -> Generated:
        """Roll out `batch_size` fresh prompts; groups that failed, or have no signal, are replaced by other prompts.

        Raises:
            RolloutFailedError: groups are still missing after `batch.max_refills`; carries the counts.
        """
        sizes = self._config.batch
        batches: list[BatchMeta] = []
        failures: dict[str, int] = {}
        rewards: list[float] = []
        drawn: dict[int, Job] = {}
        missing, dropped, reason = sizes.batch_size, 0, ""
        for attempt in range(1 + sizes.max_refills):
            jobs, sampling = self.draw(missing), self.sampling(f"{step}/{attempt}")
            drawn.update((job.group_id, job) for job in jobs)
            for report in self._agents.generate(jobs, sampling, partition, sizes.group_size):
                reason = report.last_failure or reason
                for kind, count in report.failures.items():
                    failures[kind] = failures.get(kind, 0) + count
                if report.batch is None:
                    continue
                self.observe(report.batch)
                rewards += [tags["reward"] for tags in report.batch.tags]
                kept = rows_with_signal(report.batch) if sizes.dynamic_sampling else range(len(report.batch))
                num_kept = len({report.batch.tags[row]["group_id"] for row in kept})
                dropped += len(report.complete_groups) - num_kept
                missing -= num_kept
                if kept:
                    batches.append(report.batch.reorder(kept))
            if missing == 0:
                batch = type(batches[0]).concat(batches)
                attempts = {tags["group_id"]: tags["attempt"] for tags in batch.tags}
                return Generated(
                    batch=batch,
                    groups=tuple(held_group(drawn[group], released=step, attempt=n) for group, n in attempts.items()),
                    reward=fmean(rewards),
                    failures=failures,
                    dropped_groups=dropped,
                    position=self.position,
                )
        raise RolloutFailedError(
            f"step {step}: {missing} of {sizes.batch_size} groups are missing after batch.max_refills="
            f"{sizes.max_refills}: failed rollouts {failures}, groups dropped because all their rewards are equal "
            f"{dropped}; the last failure: {reason or 'none'}"
        )

    def evaluate(self, rows: Sequence[Row]) -> float:
        """Mean reward of one completion per held-out row, at `rollout.eval_temperature`.

        Raises:
            RolloutFailedError: more than one in ten failed, so the mean would say little.
        """
        sampling = self.sampling("eval", temperature=self._config.rollout.eval_temperature)
        reports = self._agents.evaluate(list(rows), sampling)
        rewards = [reward for report in reports for reward in report.rewards]
        num_failed = sum(report.num_failed for report in reports)
        if num_failed * 10 > len(rows):
            raise RolloutFailedError(f"{num_failed} of {len(rows)} evaluation rollouts failed")
        return sum(rewards) / len(rewards)

    def draw(self, count: int, first_place: int = 0) -> list[Job]:
        """The next `count` prompts, each to become a group, in places of a step's batch from `first_place` on."""
        jobs: list[Job] = []
        for place, index in enumerate(self.order.take(count), start=first_place):
            self._num_groups += 1
            self._row_of[self._num_groups] = index
            jobs.append(Job(row=self._rows[index], row_index=index, group_id=self._num_groups, place=place))
        return jobs

    def observe(self, batch: BatchMeta) -> None:
        """Tell the order what the groups of a batch were worth: a curriculum goes by it."""
        rewards: dict[int, list[float]] = {}
        for tags in batch.tags:
            rewards.setdefault(tags["group_id"], []).append(tags["reward"])
        for group, given in rewards.items():
            self.order.observe(self._row_of.pop(group), given)

    def sampling(self, salt: str, *, temperature: float | None = None) -> dict[str, Any]:
        """Sampling parameters, seeded by the run's seed and `salt`; at `rollout.temperature` unless told otherwise."""
        rollout = self._config.rollout
        return {
            "temperature": rollout.temperature if temperature is None else temperature,
            "top_p": rollout.top_p,
            "max_new_tokens": rollout.max_new_tokens,
            "seed": hash_seed(f"{self._config.seed}/{salt}"),
        }


def held_group(job: Job, *, released: int, attempt: int) -> HeldGroup:
    """A job's group, for the record."""
    return HeldGroup(
        group_id=job.group_id, row_index=job.row_index, place=job.place, released=released, attempt=attempt
    )


def rows_with_signal(batch: BatchMeta) -> list[int]:
    """Rows of the groups whose rewards differ: of the others every group-relative advantage is 0 (arXiv 2503.14476)."""
    rewards: dict[int, set[float]] = {}
    for tags in batch.tags:
        rewards.setdefault(tags["group_id"], set()).add(tags["reward"])
    return [index for index, tags in enumerate(batch.tags) if len(rewards[tags["group_id"]]) > 1]


def hash_seed(text: str) -> int:
    """A 31-bit seed that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a pipeline drives."""

    actor: EngineWorker
    """The policy being trained."""
    reference: EngineWorker | None
    """The frozen start policy; None without a KL penalty."""
    teacher: EngineWorker | None = None
    """A frozen model that the policy is pulled towards."""
    critic: CriticWorker | None = None
    """The value function; None without one."""
    kl: AdaptiveKl = field(default_factory=lambda: AdaptiveKl(coef=0.0, target=0.0, horizon=1.0))
    """Weight of the KL in the rewards."""
    rollout_manager: RolloutManager
    """Generation."""
    weights: WeightSync
    """Actor to servers."""
    queue: TransferQueue
    """The controller's client: references only."""
    agents: AgentFleet
    """What generation runs on."""
    eval_rows: Sequence[Row]
    """Held-out rows."""
    samples: SampleWorker | None = None
    """Writes what is learned from to disk; None keeps nothing."""
    held: tuple[HeldGroup, ...] = ()
    """Groups that an earlier process finished and did not learn from; in the queue."""
    num_too_long: int = 0
    """Rows that were left out because their prompts are longer than `data.max_prompt_tokens`."""


def resource_pools(config: Config) -> list[ResourcePool]:
    """The pools of a job: for engines, for servers (unless they are colocated), for agent loops, for the queue."""
    num_gpus = 1.0 if _num_gpus() > 0 else 0.0
    pools = [
        ResourcePool(name="engine", num_workers=config.engine.world_size, num_gpus=num_gpus),
        ResourcePool(name="agent", num_workers=config.agent.num_workers),
        ResourcePool(name="queue", num_workers=1),
    ]
    if not config.rollout.colocated:
        pools.append(ResourcePool(name="rollout", num_workers=config.rollout.num_replicas, num_gpus=num_gpus))
    return pools


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def place(
    config: Config,
    runtime: Runtime,
    model_path: Path,
    datasets: Datasets,
    state: RunState,
    *,
    samples_folder: Path | None = None,
) -> Parts:
    """Start every worker of a job that goes on from `state`. The engines' own state is not loaded yet.

    What is learned from is kept in `samples_folder`, if one is given.

    Raises:
        InputError: no training or no held-out prompt is short enough.
    """
    job = f"{config.name}-{os.getpid()}"
    weights_address = f"{config.weights_transport}://{job}-weights"
    is_own_process = config.runtime != "inline"
    runtime.start(resource_pools(config))
    snapshot = queue_snapshot(config, state)
    queue_address = runtime.create_group(
        QueueWorker, "queue", address=f"{config.queue_storage}://{job}-queue", snapshot=snapshot
    ).address()
    with ThreadPoolExecutor(2, thread_name_prefix="place") as threads:  # processes start side by side
        servers = threads.submit(
            runtime.create_fleet,
            RolloutWorker,
            "engine" if config.rollout.colocated else "rollout",
            is_alone=not config.rollout.colocated,
            backend=config.rollout.backend,
            config=server_config(config, model_path),
            weights_address=weights_address,
            is_own_process=is_own_process,
            timeout_s=config.timeout_s,
        )
        if config.rollout.colocated:  # one after the other: neither counts on memory that the other will take
            put_to_sleep(servers.result())
        actor = create_engine(config, runtime, model_path, queue_address, weights_address, is_trained=True)
        reference = (
            create_engine(config, runtime, model_path, queue_address, None, is_trained=False)
            if config.algorithm.kl_coef > 0
            else None
        )
        teacher = create_teacher(config, runtime, queue_address) if config.teacher is not None else None
        critic = create_critic(config, runtime, model_path, queue_address) if config.critic is not None else None
        rollout = servers.result()
    if config.rollout.colocated:
        for engine in (reference, teacher, critic):
            if engine is not None:
                engine.offload()
    addresses = server_addresses(rollout)
    workers = runtime.create_fleet(
        AgentWorker,
        "agent",
        config=config.agent,
        reward=config.reward,
        max_new_tokens=config.rollout.max_new_tokens,
        asks_experts=config.engine.router_replay,
        has_baseline="greedy_rewards" in estimator_named(config.algorithm.advantage).needs,
        model_path=str(model_path),
        servers=addresses,
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )
    samples = None
    if samples_folder is not None:
        where = {"folder": str(samples_folder), "model_path": str(model_path), "queue_address": queue_address}
        samples = runtime.create_group(SampleWorker, "queue", timeout_s=config.timeout_s, **where)
    agents = AgentFleet(workers, addresses)
    prompts = make_prompts(config, datasets, agents.prompt_lengths, position=state.position, returned=state.pending)
    if state.order:
        prompts.order.load_state_dict({**state.order, "position": state.position, "returned": state.pending})
    held = tuple(HeldGroup.from_tuple(group) for group in state.held)
    num_groups = max((group.group_id for group in held), default=0)
    return Parts(
        actor=actor,
        reference=reference,
        teacher=teacher,
        critic=critic,
        kl=AdaptiveKl(
            coef=config.algorithm.kl_coef if state.kl_coef is None else state.kl_coef,
            target=config.algorithm.kl_target,
            horizon=config.algorithm.kl_horizon,
        ),
        rollout_manager=RolloutManager(agents, prompts.rows, prompts.order, config, num_groups=num_groups),
        held=held,
        weights=WeightSync(actor, rollout, agents, is_colocated=config.rollout.colocated),
        queue=rl_tq.connect(queue_address, timeout_s=config.timeout_s),
        agents=agents,
        eval_rows=prompts.eval_rows,
        samples=samples,
        num_too_long=prompts.num_too_long,
    )


def put_to_sleep(servers: Fleet[RolloutWorker]) -> None:
    """Have replicas give their memory back, for an engine on the same GPU."""
    for answer in servers.call(RolloutWorker.sleep, dict.fromkeys(servers.wait(), ())).values():
        if isinstance(answer, Exception):
            raise answer


def server_addresses(servers: Fleet[RolloutWorker]) -> list[ServerAddress]:
    """Where the replicas answer."""
    answers = servers.call(RolloutWorker.address, dict.fromkeys(servers.wait(), ()))
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return [answer for answer in answers.values() if not isinstance(answer, Exception)]


def create_engine(
    config: Config,
    runtime: Runtime,
    model_path: Path,
    queue_address: str,
    weights_address: str | None,
    *,
    is_trained: bool,
    num_candidates: int = 0,
) -> EngineWorker:
    """Place the actor, the reference or the teacher on the engine pool."""
    algorithm, lora = config.algorithm, config.engine.lora
    inputs = IMAGES if takes_images(model_path) else ()
    if is_trained and config.engine.router_replay:  # a reference chooses its own
        inputs += EXPERTS
    engine_config = replace(
        engine_config_of(config, model_path, config.engine.lr),
        lora=LoraConfig(**asdict(lora)) if is_trained and lora is not None else None,
        entropy=is_trained and algorithm.entropy_coef > 0,
        sum_pi_squared=is_trained and "sum_pi_squared" in estimator_named(algorithm.advantage).needs,
        num_candidates=num_candidates,
        router_aux_loss_coef=config.engine.router_aux_loss_coef if is_trained else 0.0,
    )
    return runtime.create_group(
        EngineWorker,
        "engine",
        backend=config.engine.backend,
        config=engine_config if is_trained else replace(engine_config, optimizer=None),
        algorithm=algorithm,
        inputs=inputs,
        teacher=config.teacher,
        queue_address=queue_address,
        weights_address=weights_address,
        timeout_s=config.timeout_s,
    )


def create_teacher(config: Config, runtime: Runtime, queue_address: str) -> EngineWorker:
    """Place the teacher on the engine pool, laid out like the policy."""
    assert config.teacher is not None, "the caller has checked it"
    path, num_candidates = Path(config.teacher.path), config.teacher.num_candidates
    return create_engine(
        config,
        runtime,
        path,
        queue_address,
        None,
        is_trained=False,
        num_candidates=0 if config.teacher.divergence == "reverse" else num_candidates,
    )


def create_critic(config: Config, runtime: Runtime, model_path: Path, queue_address: str) -> CriticWorker:
    """Place the value function on the engine pool, laid out like the policy."""
    assert config.critic is not None, "the caller has checked it"
    path = Path(config.critic.path) if config.critic.path is not None else model_path
    return runtime.create_group(
        CriticWorker,
        "engine",
        backend=config.engine.backend,
        config=replace(engine_config_of(config, path, config.critic.lr), head=Head.VALUE),
        clip=config.critic.clip,
        inputs=IMAGES if takes_images(model_path) else (),
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )


def engine_config_of(config: Config, model_path: Path, lr: float) -> EngineConfig:
    """What every trained engine of a job has in common."""
    section = config.engine
    num_updates = config.batch.batch_size // config.batch.mini_batch_size
    optimizer = OptimizerConfig(
        lr=lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        warmup_steps=section.lr_warmup_steps,
        total_steps=config.steps * num_updates if section.lr_schedule == "cosine" else None,
    )
    return EngineConfig(
        model_path=str(model_path),
        optimizer=optimizer,
        parallel=section.parallel,
        precision=Precision(section.precision),
        matmul_precision=MatmulPrecision(section.matmul_precision),
        max_tokens_per_gpu=config.batch.max_tokens_per_gpu,
        temperature=config.rollout.temperature,
        activation_checkpointing=section.activation_checkpointing,
        async_checkpoints=section.async_checkpoints,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )


def server_config(config: Config, model_path: Path) -> ServerConfig:
    """What one rollout server is built from."""
    return ServerConfig(
        model_path=str(model_path),
        max_model_len=config.rollout.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        options=config.rollout.options,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )
