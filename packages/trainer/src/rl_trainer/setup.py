"""Setup of a run: starts engines, servers, agents, queue and critic, and returns the components of the loop."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import rl_tq.registry
from rl_trainer.algorithms import Aggregation, ValueLossFunction, estimator_named
from rl_trainer.algorithms.critic_losses import ProcessRewardLoss
from rl_trainer.algorithms.kl_controller import AdaptiveEntropy, AdaptiveKl
from rl_trainer.checkpoints import folder_of, queue_snapshot
from rl_trainer.config.schema import ENGINE_POOL
from rl_trainer.data import shows_images
from rl_trainer.data.sampler import make_prompts
from rl_trainer.pipeline import ema_reference
from rl_trainer.pipeline.components import Components
from rl_trainer.pipeline.ema_reference import EmaReference
from rl_trainer.pipeline.replay_buffer import Replay
from rl_trainer.pipeline.replicas import AgentReplicas, SomeSamples
from rl_trainer.pipeline.roles import (
    actor_config,
    candidates_of,
    critic_config,
    engine_of,
    frozen_config,
    has,
    has_old_pass,
    has_process_rewards,
    has_reference,
    home_of,
    is_in_turn,
    is_offloaded,
    is_self,
    lends_engine,
    model_facts,
    policies_of,
    pool_of,
    reward_models,
    sends_adapter,
    server_config,
    teacher_folders,
    update_barrier,
)
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.pipeline.weight_sync import WeightSync, on_all
from rl_trainer.pipeline.weight_transfer import (
    GatheredTransfer,
    ShardedTransfer,
    WeightTransfer,
    chain_address,
    session_pattern,
    write_start_adapter,
)
from rl_trainer.planning.gpus import resource_pools
from rl_trainer.planning.memory import learning_flops
from rl_trainer.planning.preflight import check_started, why_gathered
from rl_trainer.runtime.network import address_of, check_reach, has_votes, storage_of
from rl_trainer.runtime.processes import rare_collections
from rl_trainer.samples import FOLDER
from rl_trainer.workers.agent import AgentWorker
from rl_trainer.workers.columns import EXPERTS
from rl_trainer.workers.critic import CriticWorker, ProcessRewardWorker
from rl_trainer.workers.engine_worker import EngineWorker
from rl_trainer.workers.queue import QueueWorker, SampleWorker
from rl_trainer.workers.reference import ReferenceWorker
from rl_trainer.workers.reward_server import RewardServers
from rl_trainer.workers.rollout import RolloutWorker
from rl_trainer.workers.teacher import Teachers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.types import Capabilities, ServerAddress
    from rl_tq.base import TransferQueue
    from rl_trainer.checkpoints import RunState
    from rl_trainer.config import Config
    from rl_trainer.data import Datasets
    from rl_trainer.data.sampler import Prompts
    from rl_trainer.runtime.base import ReplicaSet, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Values that every role of a job is started with."""

    config: Config
    runtime: Runtime
    model_path: Path
    state: RunState
    output_dir: Path | None
    """Folder of samples, and of a reference that moves."""
    name: str
    """Part of addresses that no other job, and no other policy, has."""
    store: QueueWorker
    queue_address: str
    weights_address: str = ""
    policy: str = ""
    """Name of the policy, where there are several."""
    is_first: bool = True
    """Whether it is the first policy, which reward models take turns with."""

    def pool(self, name: str) -> str:
        """Name of one of its pools."""
        return pool_of(self.policy, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines of a job, and the reward models that it serves."""

    actor: EngineWorker
    reference: EngineWorker | None
    ema_reference: EmaReference | None
    teacher: EngineWorker | Teachers | None
    critic: CriticWorker | None
    rewards: RewardServers | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Rollout servers of a job."""

    replicas: ReplicaSet[RolloutWorker]
    """Those that serve all along."""
    lent: ReplicaSet[RolloutWorker] | None
    """Those on the engine's GPUs while learning waits, asleep."""
    addresses: list[ServerAddress]
    capabilities: list[Capabilities]


@rare_collections()
def place(
    config: Config,
    runtime: Runtime,
    model_path: Path,
    datasets: Datasets,
    state: RunState,
    *,
    output_dir: Path | None = None,
) -> Components:
    """Start every worker of a job that goes on from `state`. The engines' own state is not loaded yet.

    Samples that are kept, and a reference that moves, have their folders in `output_dir`.

    Raises:
        InputError: no training or no held-out prompt is short enough.
    """
    job = open_job(config, runtime, model_path, state, output_dir)
    jobs = [job_of_policy(job, name, own) for name, own in policies_of(config).items()]
    started = [start_in_turn(own) for own in jobs]
    rows = (*datasets.train, *datasets.eval)
    has_images = any(map(shows_images, rows))
    for own, (_, servers) in zip(jobs, started, strict=True):
        for can in servers.capabilities:
            check_started(own.config, can, has_images=has_images)
    agents = create_agents(jobs, started)
    prompts = create_prompts(job, datasets, agents)
    queue = rl_tq.registry.connect(job.queue_address, timeout_s=config.timeout_s)
    replay = create_replay(job, queue)
    is_seeded = all(can.is_seeded for _, servers in started for can in servers.capabilities)
    source = create_source(job, agents, prompts, queue, replay, is_seeded=is_seeded)
    first, *others = [
        Components(
            actor=engines.actor,
            reference=engines.reference,
            ema_reference=engines.ema_reference,
            teacher=engines.teacher,
            critic=engines.critic,
            kl=kl_of(own.config, own.state),
            entropy=entropy_of(own.config, own.state),
            source=source,
            replay=replay,
            held=state.held,
            weights=create_weight_sync(own, engines, servers, agents),
            queue=queue,
            agents=agents,
            eval_rows=prompts.eval_rows,
            samples=create_samples(own, agents),
            num_too_long=prompts.num_too_long,
            num_bad=prompts.num_bad,
            pools=scoring_pools(own.config),
            policy=own.policy,
        )
        for own, (engines, servers) in zip(jobs, started, strict=True)
    ]
    return replace(first, others=tuple(others))


def open_job(config: Config, runtime: Runtime, model_path: Path, state: RunState, output_dir: Path | None) -> Job:
    """Start the pools and the queue, and choose the addresses."""
    name = f"{config.name}-{os.getpid()}"
    runtime.start(resource_pools(config))
    storage = storage_of(config.queue_storage, runtime.num_machines)
    for key, backend in (("weights_transport", config.weights_transport), ("queue_storage", storage)):
        check_reach(key, backend, runtime.num_machines)
    snapshot = queue_snapshot(config, state)
    store = runtime.create_group(
        QueueWorker,
        "queue",
        prepare=partial(create_schedule, config),
        storage=storage,
        name=f"{name}-queue",
        snapshot=snapshot,
    )
    return Job(
        config=config,
        runtime=runtime,
        model_path=model_path,
        state=state,
        output_dir=output_dir,
        name=name,
        store=store,
        queue_address=store.address(),
    )


def job_of_policy(job: Job, policy: str, config: Config) -> Job:
    """Job as one policy has it: its configuration, model, folder and state, and the address of its weights."""
    name, output_dir = f"{job.name}-{policy}" if policy else job.name, job.output_dir
    if policy and config.resume_from is not None:
        config = replace(config, resume_from=str(folder_of(Path(config.resume_from), policy)))
    if policy and output_dir is not None:
        output_dir = folder_of(output_dir, policy)
        output_dir.mkdir(parents=True, exist_ok=True)
    free = job.runtime.free_address(pool_of(policy, ENGINE_POOL))
    address = address_of(config.weights_transport, f"{name}-weights", free)
    return replace(
        job,
        config=config,
        model_path=Path(config.model.path) if policy and config.model.path is not None else job.model_path,
        state=replace(job.state, **job.state.policies.get(policy, {})),
        output_dir=output_dir,
        name=name,
        weights_address=chain_address(address) if config.weights.delta and not has_votes(address) else address,
        policy=policy,
        is_first=policy == next(iter(policies_of(job.config))),
    )


def start_in_turn(job: Job) -> tuple[Engines, Servers]:
    """Start engines and servers: at the same time where each has its GPUs, else in turn.

    Those that share a GPU must not count on memory that the others will take. In the end, those are asleep or offloaded
    that wait for their turn; the actor is not.
    """
    config = job.config
    threads = ThreadPoolExecutor(1, thread_name_prefix="place")
    starting, lent = threads.submit(create_servers, job), None
    try:
        if lends_engine(config):
            lent = create_servers(job, on_engine=True)
            on_all(lent, RolloutWorker.sleep)  # their memory is for the engine
        if is_offloaded(config):
            on_all(starting.result(), RolloutWorker.sleep)
        engines = create_engines(job)
        replicas = starting.result()
    finally:
        threads.shutdown(wait=False)  # where one side fails, the other's start is ended with the workers
    for role, engine in (("reference", engines.reference), ("teacher", engines.teacher), ("critic", engines.critic)):
        if engine is not None and engine is not engines.actor and is_in_turn(config, role):
            engine.offload()
    return engines, Servers(
        replicas=replicas,
        lent=lent,
        addresses=[*on_all(replicas, RolloutWorker.address).values()],
        capabilities=[*on_all(replicas, RolloutWorker.capabilities).values()],
    )


def create_engines(job: Job) -> Engines:
    """Start the reward models and every engine, one after the other."""
    rewards = create_rewards(job) if job.is_first else None
    actor = create_engine(job)
    reference, ema_reference = create_reference(job, actor)
    return Engines(
        actor=actor,
        reference=reference,
        ema_reference=ema_reference,
        teacher=create_teacher(job, actor),
        critic=create_critic(job),
        rewards=rewards,
    )


def create_prompts(job: Job, datasets: Datasets, agents: AgentReplicas) -> Prompts:
    """Measure the prompts, and make the sampler, which goes on where the state has it."""
    state, prompts = job.state, make_prompts(job.config, datasets, agents.prompt_lengths)
    prompts.order.load_state_dict({**state.order, "position": state.position, "returned": state.pending})
    return prompts


def create_replay(job: Job, queue: TransferQueue) -> Replay | None:
    """Make the replay buffer, with the groups that the state has; None without `batch.replay`."""
    section = job.config.batch.replay
    if section is None:
        return None
    sizes = {"batch_size": job.config.batch.batch_size, "seed": job.config.seed}
    replay = Replay(section, **sizes, queue=queue, copy=job.store.copy)
    replay.restore(job.state.history)
    return replay


def create_source(
    job: Job,
    agents: AgentReplicas,
    prompts: Prompts,
    queue: TransferQueue,
    replay: Replay | None,
    *,
    is_seeded: bool,
) -> RolloutSource:
    """Make the rollout source, which gives no group id a second time."""
    known = [group.group_id for group in job.state.held] + ([] if replay is None else replay.group_ids)
    return RolloutSource(
        agents,
        prompts.rows,
        prompts.order,
        queue,
        job.config,
        create_schedule(job.config).policy,
        replay=replay,
        first_step=job.state.step + 1,
        num_groups=max(known, default=0),
        is_seeded=is_seeded,
    )


def create_weight_sync(job: Job, engines: Engines, servers: Servers, agents: AgentReplicas) -> WeightSync:
    """Make the weight sync, with a separate session for servers on lent GPUs."""
    config, lent_transfer = job.config, None
    if servers.lent is not None:
        free = job.runtime.free_address(job.pool(ENGINE_POOL))
        address = address_of(config.weights_transport, f"{job.name}-lent-weights", free)
        lent_transfer = GatheredTransfer(engines.actor, address, is_own=True)
    return WeightSync(
        engines.actor,
        servers.replicas,
        agents,
        create_transfer(job, engines.actor, servers.capabilities),
        rewards=engines.rewards if is_in_turn(config, "reward") else None,
        lent=servers.lent,
        lent_transfer=lent_transfer,
        is_offloaded=is_offloaded(config),
        policy=job.policy,
    )


def scoring_pools(config: Config) -> dict[str, str]:
    """By scoring stage, the pool of a role that shares no process with the policy; inline all are one process."""
    roles = {"ref_logprobs": "reference", "teacher_logprobs": "teacher", "values": "critic"}
    homes = {stage: home_of(config, role) for stage, role in roles.items() if has(config, role)}
    return {stage: pool for stage, pool in homes.items() if pool != ENGINE_POOL and config.runtime != "inline"}


def create_transfer(job: Job, actor: EngineWorker, capabilities: Sequence[Capabilities]) -> WeightTransfer:
    """Make the weight transfer: from shard to shard where engine, servers and transport can."""
    if any(why_gathered(job.config, can) for can in capabilities):
        return GatheredTransfer(actor, job.weights_address)
    pattern = session_pattern(job.weights_address, delta=job.config.weights.delta)
    return ShardedTransfer(actor, pattern, job.output_dir)


def create_servers(job: Job, *, on_engine: bool = False) -> ReplicaSet[RolloutWorker]:
    """Start the rollout replicas, on the engine's GPUs if they are colocated; with `on_engine` those that are lent."""
    config, adapter = job.config, None
    if sends_adapter(config) and not on_engine:
        assert config.engine.lora is not None and job.output_dir is not None, "a run has a folder"  # noqa: PT018
        adapter = write_start_adapter(job.output_dir / "start-adapter", job.model_path, config.engine.lora)
    on_engine = on_engine or bool(config.rollout.colocated)
    return job.runtime.create_replicas(
        RolloutWorker,
        job.pool(ENGINE_POOL if on_engine else "rollout"),
        owns_pool=not on_engine,
        ranks_per_member=config.rollout.parallel.num_ranks if on_engine else 1,
        num_members=config.rollout.num_replicas if config.rollout.colocated else None,
        backend=config.rollout.backend,
        config=server_config(config, job.model_path, adapter),
        is_own_process=config.runtime != "inline",
        timeout_s=config.timeout_s,
        heartbeat_s=config.heartbeat_s,
    )


def create_agents(jobs: Sequence[Job], started: Sequence[tuple[Engines, Servers]]) -> AgentReplicas:
    """Start the agent workers, which generate on the servers of all policies and ask the reward models."""
    job, config, rewards = jobs[0], jobs[0].config, started[0][0].rewards
    addresses = {own.policy: tuple(servers.addresses) for own, (_, servers) in zip(jobs, started, strict=True)}
    agents = job.runtime.create_replicas(
        AgentWorker,
        "agent",
        config=config,
        has_baseline="greedy_rewards" in estimator_named(config.algorithm.advantage).reads,
        model_paths={own.policy: str(own.model_path) for own in jobs},
        servers=addresses,
        takes_videos=all(can.takes_videos for _, servers in started for can in servers.capabilities),
        queue_address=job.queue_address,
        timeout_s=config.timeout_s,
    )
    replicas = AgentReplicas(agents, addresses)
    if rewards is not None and not is_in_turn(config, "reward"):
        replicas.use_rewards(rewards.wake())
    return replicas


def create_reference(job: Job, actor: EngineWorker) -> tuple[EngineWorker | None, EmaReference | None]:
    """Start the reference and its EMA, if the run has a reference that is not the actor."""
    config = job.config
    if not has_reference(config):
        return None, None
    if not has(config, "reference"):  # the actor with its adapter turned off
        return actor, None
    start, ema = ema_reference.start_of(config, job.model_path), config.algorithm.ref_ema
    reference = create_engine(replace(job, model_path=start), role="reference")
    if ema is None:
        return reference, None
    assert job.output_dir is not None, "a run whose reference moves has a folder"
    folder, moved = job.output_dir / ema_reference.FOLDER, cast("ReferenceWorker", reference)
    waits = is_in_turn(config, "reference")
    return reference, EmaReference(actor, moved, ema, folder=folder, start=start, is_offloaded=waits)


def create_samples(job: Job, agents: AgentReplicas) -> SampleWorker | SomeSamples | None:
    """Start the sample writer, if samples are saved: some of them on one machine alone, with the workers."""
    config, folder = job.config, job.output_dir
    if config.tracking.keep_samples == "some":
        is_learned_whole = not config.batch.stream or update_barrier(config) is not None
        is_whole = job.runtime.num_machines == 1 and is_learned_whole and find_spec("pyarrow") is not None
        return SomeSamples(agents, folder / FOLDER, config.steps) if folder and is_whole else None
    if not config.tracking.keep_samples:
        return None
    assert folder is not None, "a run that keeps samples has a folder"
    return job.runtime.create_group(
        SampleWorker,
        "queue",
        folder=str(folder / FOLDER),
        model_path=str(job.model_path),
        queue_address=job.queue_address,
        timeout_s=config.timeout_s,
    )


def kl_of(config: Config, state: RunState) -> AdaptiveKl:
    """KL controller; one that follows a target resumes its coefficient."""
    coef, target = config.algorithm.kl_coef, config.algorithm.kl_target
    return AdaptiveKl(coef=state.kl_coef if target and state.kl_coef else coef, target=target)


def entropy_of(config: Config, state: RunState) -> AdaptiveEntropy:
    """Entropy controller; one that follows a target resumes its coefficient."""
    algorithm, stood = config.algorithm, state.entropy_coef
    coef = algorithm.entropy_coef if stood is None or not algorithm.entropy_target else stood
    return AdaptiveEntropy(coef=coef, target=algorithm.entropy_target, step=algorithm.entropy_step)


def create_rewards(job: Job) -> RewardServers | None:
    """Start the reward models that the run serves, asleep where they are colocated; None if there are none."""
    config = job.config
    models = reward_models(config)
    if not models:
        return None
    rewards = job.runtime.create_group(
        RewardServers,
        job.pool(home_of(config, "reward")),
        models=models,
        is_own_process=config.runtime != "inline",
        timeout_s=config.timeout_s,
        heartbeat_s=config.heartbeat_s,
    )
    if is_in_turn(config, "reward"):
        rewards.sleep()
    return rewards


def create_engine(job: Job, role: str | None = None, *, num_candidates: int = 0) -> EngineWorker:
    """Start the actor, or as `role` the reference or the teacher, in its pool."""
    config, model_path = job.config, job.model_path
    section = config.engine if role is None else engine_of(config, role)
    inputs = model_facts(model_path).image_columns
    if role is None and config.engine.router_replay:  # a reference chooses its own
        inputs += EXPERTS
    is_measured = role is None and (model_path / "config.json").is_file()
    return job.runtime.create_group(
        EngineWorker if role is None else ReferenceWorker,
        job.pool(ENGINE_POOL if role is None else home_of(config, role)),
        backend=section.backend,
        config=actor_config(config, model_path)
        if role is None
        else frozen_config(config, role, model_path, num_candidates),
        algorithm=config.algorithm,
        has_old_pass=has_old_pass(config),
        has_given=config.batch.given > 0,
        inputs=inputs,
        flops_per_token=learning_flops(config, model_facts(model_path).config) if is_measured else None,
        teacher=config.teacher,
        max_new_tokens=config.rollout.max_new_tokens,
        queue_address=job.queue_address,
        weights_address=job.weights_address if role is None else None,
        timeout_s=config.timeout_s,
    )


def create_teacher(job: Job, actor: EngineWorker) -> EngineWorker | Teachers | None:
    """Start the teachers that the run loads, in their pool; the policy may be its own teacher."""
    config, teacher = job.config, job.config.teacher
    if teacher is None or teacher.url is not None:  # agent workers ask a served one
        return None
    if is_self(teacher):
        return actor
    engines = {
        source: create_engine(replace(job, model_path=path), "teacher", num_candidates=candidates_of(teacher))
        for source, path in teacher_folders(teacher).items()
    }
    return Teachers(engines, engine_of(config, "teacher").world_size) if len(engines) > 1 else engines[""]


def create_critic(job: Job) -> CriticWorker | None:
    """Start the critic in its pool, if the run has one."""
    config, section = job.config, job.config.critic
    if section is None:
        return None
    is_process = has_process_rewards(config)
    aggregation = Aggregation(name=config.algorithm.aggregation, norm_constant=config.rollout.max_new_tokens)
    return job.runtime.create_group(
        ProcessRewardWorker if is_process else CriticWorker,
        job.pool(home_of(config, "critic")),
        backend=engine_of(config, "critic").backend,
        config=critic_config(config, section, job.model_path),
        loss=ProcessRewardLoss() if is_process else ValueLossFunction(clip=section.clip, aggregation=aggregation),
        inputs=model_facts(job.model_path).image_columns,
        masks_truncated=config.algorithm.mask_truncated,
        queue_address=job.queue_address,
        timeout_s=config.timeout_s,
    )
