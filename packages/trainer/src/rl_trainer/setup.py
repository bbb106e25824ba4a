"""Setup of a run: places engines, servers, agents, queue and critic, and returns the components of the loop."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar, cast

import rl_tq
from rl_trainer.algorithms import Aggregation, ValueLossFunction, estimator_named
from rl_trainer.algorithms.critic_losses import ProcessRewardLoss
from rl_trainer.algorithms.kl_controller import AdaptiveEntropy, AdaptiveKl
from rl_trainer.checkpoints import queue_snapshot
from rl_trainer.config.schema import ENGINE_POOL
from rl_trainer.data import shows_images
from rl_trainer.data.sampler import make_prompts
from rl_trainer.errors import DataError, PlanError
from rl_trainer.metrics import HeldGroup
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
    model_config,
    reward_models,
    sends_adapter,
    server_config,
    teacher_folders,
    update_barrier,
)
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.pipeline.weight_sync import WeightSync
from rl_trainer.pipeline.weight_transfer import (
    GatheredTransfer,
    ShardedTransfer,
    WeightTransfer,
    chain_address,
    session_pattern,
    write_start_adapter,
)
from rl_trainer.planning.environments import engine_python
from rl_trainer.planning.gpus import count_gpus, named, why_apart
from rl_trainer.planning.memory import learning_flops
from rl_trainer.planning.placement import pools_of
from rl_trainer.planning.preflight import check_started, why_gathered
from rl_trainer.runtime.base import ResourcePool
from rl_trainer.runtime.network import address_of, check_reach, has_votes, storage_of
from rl_trainer.samples import FOLDER
from rl_trainer.workers.agent import AgentWorker
from rl_trainer.workers.columns import EXPERTS, IMAGES, takes_images
from rl_trainer.workers.engine import CriticWorker, EngineWorker, ProcessRewardWorker, ReferenceWorker
from rl_trainer.workers.queue import QueueWorker, SampleWorker
from rl_trainer.workers.reward_server import RewardServers
from rl_trainer.workers.rollout import RolloutWorker
from rl_trainer.workers.teacher import ServedTeacherWorker, Teachers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from rl_rollout.types import Capabilities, ServerAddress
    from rl_trainer.checkpoints import RunState
    from rl_trainer.config import Config
    from rl_trainer.data import Datasets, Row
    from rl_trainer.runtime.base import ReplicaSet, Runtime

R = TypeVar("R")


def resource_pools(config: Config) -> list[ResourcePool]:
    """The pools of a job, with a GPU for each that they ask for where there are any."""
    has_gpus = count_gpus(config) > 0
    return [
        ResourcePool(
            name=pool.name,
            num_workers=pool.num_workers,
            num_gpus=float(pool.gpus_per_worker * has_gpus),
            python=engine_python(config) if pool.name == ENGINE_POOL else None,
            is_elastic=pool.name == "rollout" and config.rollout.elastic is not None,
        )
        for pool in pools_of(config)
    ]


def check_gpus(config: Config) -> None:
    """Check that there are the GPUs that the pools will ask for, on this machine or in the cluster that is joined.

    Raises:
        PlanError: there are fewer.
    """
    there = count_gpus(config)
    wanted = {pool.name: round(pool.num_workers * pool.num_gpus) for pool in resource_pools(config)}
    if config.runtime == "ray" and sum(wanted.values()) > there:
        asked = named({name: count for name, count in wanted.items() if count})
        obstacle = why_apart(config, there) or "rollout.colocated=false keeps servers on their own: leave it out"
        where, more = ("the cluster", "a larger one") if "RAY_ADDRESS" in os.environ else ("this machine", "a cluster")
        raise PlanError(
            f"the run asks for {sum(wanted.values())} GPUs ({asked}), and "
            f"{where} has {there}, which they cannot share because {obstacle}; or set RAY_ADDRESS of {more}"
        )


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
    job = f"{config.name}-{os.getpid()}"
    runtime.start(resource_pools(config))
    storage = storage_of(config.queue_storage, runtime.num_machines)
    for key, backend in (("weights_transport", config.weights_transport), ("queue_storage", storage)):
        check_reach(key, backend, runtime.num_machines)
    weights_address = address_of(config.weights_transport, f"{job}-weights", runtime.free_address(ENGINE_POOL))
    lent_address = None
    if lends_engine(config):
        lent_address = address_of(config.weights_transport, f"{job}-lent-weights", runtime.free_address(ENGINE_POOL))
    if config.weights.delta and not has_votes(weights_address):
        weights_address = chain_address(weights_address)
    snapshot = queue_snapshot(config, state)
    store = runtime.create_group(QueueWorker, "queue", storage=storage, name=f"{job}-queue", snapshot=snapshot)
    queue_address = store.address()
    threads = ThreadPoolExecutor(1, thread_name_prefix="place")
    adapter = None
    if sends_adapter(config):
        assert config.engine.lora is not None and output_dir is not None, "a run has a folder"  # noqa: PT018
        adapter = write_start_adapter(output_dir / "start-adapter", model_path, config.engine.lora)
    servers, lent = threads.submit(create_servers, config, runtime, model_path, adapter), None
    try:  # processes start side by side
        if lends_engine(config):
            lent = create_servers(config, runtime, model_path, on_engine=True)
            put_to_sleep(lent)
        if is_offloaded(config):  # one after the other: neither counts on memory that the other will take
            put_to_sleep(servers.result())
        rewards = create_rewards(config, runtime)
        actor = create_engine(config, runtime, model_path, queue_address, weights_address)
        reference, moving = create_reference(config, runtime, actor, model_path, queue_address, output_dir)
        teacher = create_teacher(config, runtime, actor, queue_address)
        critic = create_critic(config, runtime, model_path, queue_address)
        rollout = servers.result()
    finally:
        threads.shutdown(wait=False)  # where one side fails, the other's start is ended with the workers
    for role, engine in (("reference", reference), ("teacher", teacher), ("critic", critic)):
        if engine is not None and engine is not actor and is_in_turn(config, role):
            engine.offload()
    check_given(datasets.train, config.batch.given)
    addresses = _answers(rollout, RolloutWorker.address)
    has_images = any(shows_images(row) for row in (*datasets.train, *datasets.eval))
    capabilities = _answers(rollout, RolloutWorker.capabilities)
    for can in capabilities:
        check_started(config, can, has_images=has_images)
    agents = AgentReplicas(create_agents(config, runtime, model_path, queue_address, addresses), addresses)
    if rewards is not None and not is_in_turn(config, "reward"):
        agents.use_rewards(rewards.wake())
    samples = create_samples(config, runtime, model_path, queue_address, output_dir, agents)
    prompts = make_prompts(config, datasets, agents.prompt_lengths, position=state.position, returned=state.pending)
    if state.order:
        prompts.order.load_state_dict({**state.order, "position": state.position, "returned": state.pending})
    held = tuple(HeldGroup.from_tuple(group) for group in state.held)
    num_groups = max((group.group_id for group in held), default=0)
    queue, history = rl_tq.connect(queue_address, timeout_s=config.timeout_s), None
    if (section := config.batch.replay) is not None:
        history = Replay(section, batch_size=config.batch.batch_size, seed=config.seed, queue=queue, copy=store.copy)
        num_groups = max(num_groups, history.restore(state.history))
    return Components(
        actor=actor,
        reference=reference,
        ema_reference=moving,
        teacher=teacher,
        critic=critic,
        kl=kl_of(config, state),
        entropy=entropy_of(config, state),
        source=RolloutSource(
            agents,
            prompts.rows,
            prompts.order,
            queue,
            config,
            create_schedule(config).policy,
            replay=history,
            first_step=state.step + 1,
            num_groups=num_groups,
            is_seeded=all(can.is_seeded for can in capabilities),
        ),
        replay=history,
        held=held,
        weights=WeightSync(
            actor,
            rollout,
            agents,
            create_transfer(config, actor, weights_address, capabilities, output_dir),
            rewards=rewards if is_in_turn(config, "reward") else None,
            lent=lent,
            lent_transfer=GatheredTransfer(actor, lent_address, is_own=True) if lent_address else None,
            is_offloaded=is_offloaded(config),
        ),
        queue=queue,
        agents=agents,
        eval_rows=prompts.eval_rows,
        samples=samples,
        num_too_long=prompts.num_too_long,
        num_bad=prompts.num_bad,
        pools=scoring_pools(config),
    )


def scoring_pools(config: Config) -> dict[str, str]:
    """By scoring stage, the pool of a role that shares no process with the policy; inline all are one process."""
    roles = {"ref_logprobs": "reference", "teacher_logprobs": "teacher", "values": "critic"}
    homes = {stage: home_of(config, role) for stage, role in roles.items() if has(config, role)}
    return {stage: pool for stage, pool in homes.items() if pool != ENGINE_POOL and config.runtime != "inline"}


def check_given(rows: Iterable[Row], count: int) -> None:
    """Check that every row gives as many completions as its group takes from it.

    Raises:
        DataError: one does not.
    """
    for row in rows if count else ():
        given = row.get("given")
        if not isinstance(given, list | tuple) or len(given) < count or not all(isinstance(x, str) for x in given):
            raise DataError(
                f"batch.given={count} takes completions from every row, and one of {row['data_source']!r} has "
                f"given={given!r:.80}; give each a list of {count} texts or more, or lower batch.given"
            )


def create_transfer(
    config: Config, actor: EngineWorker, address: str, capabilities: Sequence[Capabilities], folder: Path | None
) -> WeightTransfer:
    """Create the weight transfer: from shard to shard where engine, servers and transport can."""
    if any(why_gathered(config, can) for can in capabilities):
        return GatheredTransfer(actor, address)
    return ShardedTransfer(actor, session_pattern(address, delta=config.weights.delta), folder)


def create_servers(
    config: Config, runtime: Runtime, model_path: Path, adapter: Path | None = None, *, on_engine: bool | None = None
) -> ReplicaSet[RolloutWorker]:
    """Place the rollout replicas, on the GPUs of the engine where they are colocated, or as `on_engine` says."""
    on_engine = bool(config.rollout.colocated) if on_engine is None else on_engine
    return runtime.create_replicas(
        RolloutWorker,
        ENGINE_POOL if on_engine else "rollout",
        owns_pool=not on_engine,
        ranks_per_member=config.rollout.parallel.num_ranks if on_engine else 1,
        backend=config.rollout.backend,
        config=server_config(config, model_path, adapter),
        is_own_process=config.runtime != "inline",
        timeout_s=config.timeout_s,
        heartbeat_s=config.heartbeat_s,
    )


def create_agents(
    config: Config, runtime: Runtime, model_path: Path, queue_address: str, servers: Sequence[ServerAddress]
) -> ReplicaSet[AgentWorker]:
    """Place the agent workers, which generate on `servers`."""
    return runtime.create_replicas(
        AgentWorker,
        "agent",
        config=config.agent,
        reward=config.reward,
        max_new_tokens=config.rollout.max_new_tokens,
        asks_experts=config.engine.router_replay,
        has_baseline="greedy_rewards" in estimator_named(config.algorithm.advantage).needs,
        num_steps=config.steps,
        num_given=config.batch.given,
        teacher=config.teacher,
        model_path=str(model_path),
        servers=servers,
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )


def create_reference(
    config: Config,
    runtime: Runtime,
    actor: EngineWorker,
    model_path: Path,
    queue_address: str,
    output_dir: Path | None,
) -> tuple[EngineWorker | None, EmaReference | None]:
    """Place the reference and its EMA, if the run has a reference that is not the actor."""
    if not has_reference(config):
        return None, None
    if is_own_reference(config):
        return actor, None
    start, ema = ema_reference.start_of(config, model_path), config.algorithm.ref_ema
    reference = create_engine(config, runtime, start, queue_address, None, role="reference")
    if ema is None:
        return reference, None
    assert output_dir is not None, "a run whose reference moves has a folder"
    folder, moved = output_dir / ema_reference.FOLDER, cast("ReferenceWorker", reference)
    waits = is_in_turn(config, "reference")
    return reference, EmaReference(actor, moved, ema, folder=folder, start=start, is_offloaded=waits)


def create_samples(
    config: Config,
    runtime: Runtime,
    model_path: Path,
    queue_address: str,
    output_dir: Path | None,
    agents: AgentReplicas,
) -> SampleWorker | SomeSamples | None:
    """Place the sample writer, if samples are kept: some of them on one machine alone, with the workers."""
    if config.tracking.keep_samples == "some":
        is_learned_whole = not config.batch.stream or update_barrier(config) is not None
        is_whole = runtime.num_machines == 1 and is_learned_whole and find_spec("pyarrow") is not None
        return SomeSamples(agents, output_dir / FOLDER, config.steps) if output_dir and is_whole else None
    if not config.tracking.keep_samples:
        return None
    assert output_dir is not None, "a run that keeps samples has a folder"
    return runtime.create_group(
        SampleWorker,
        "queue",
        folder=str(output_dir / FOLDER),
        model_path=str(model_path),
        queue_address=queue_address,
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


def is_own_reference(config: Config) -> bool:
    """Whether the actor, with its adapter turned off, is the reference too."""
    return config.engine.lora is not None


def create_rewards(config: Config, runtime: Runtime) -> RewardServers | None:
    """Place the reward models that the run serves, asleep where they are colocated; None if there are none."""
    folders = reward_models(config)
    if not folders:
        return None
    pool = home_of(config, "reward")
    heartbeat_s = None if config.runtime == "inline" else config.heartbeat_s
    rewards = runtime.create_group(
        RewardServers, pool, folders=folders, timeout_s=config.timeout_s, heartbeat_s=heartbeat_s
    )
    if is_in_turn(config, "reward"):
        rewards.wake()  # what cannot be loaded is told now
        rewards.sleep()
    return rewards


def put_to_sleep(servers: ReplicaSet[RolloutWorker]) -> None:
    """Put replicas to sleep: their memory is for an engine on the same GPU."""
    for answer in servers.call(RolloutWorker.sleep, dict.fromkeys(servers.wait(), ())).values():
        if isinstance(answer, Exception):
            raise answer


def _answers(servers: ReplicaSet[RolloutWorker], method: Callable[[RolloutWorker], R]) -> list[R]:
    """Answers of replicas, or the first error."""
    answers = servers.call(method, dict.fromkeys(servers.wait(), ()))
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
    role: str | None = None,
    num_candidates: int = 0,
) -> EngineWorker:
    """Place the actor, or as `role` the reference or the teacher, in its pool."""
    section = config.engine if role is None else engine_of(config, role)
    inputs = IMAGES if takes_images(model_path) else ()
    if role is None and config.engine.router_replay:  # a reference chooses its own
        inputs += EXPERTS
    is_measured = role is None and (model_path / "config.json").is_file()
    return runtime.create_group(
        EngineWorker if role is None else ReferenceWorker,
        ENGINE_POOL if role is None else home_of(config, role),
        backend=section.backend,
        config=actor_config(config, model_path)
        if role is None
        else frozen_config(config, role, model_path, num_candidates),
        algorithm=config.algorithm,
        has_old_pass=has_old_pass(config),
        has_given=config.batch.given > 0,
        inputs=inputs,
        flops_per_token=learning_flops(config, model_config(model_path)) if is_measured else None,
        teacher=config.teacher,
        max_new_tokens=config.rollout.max_new_tokens,
        queue_address=queue_address,
        weights_address=weights_address,
        timeout_s=config.timeout_s,
    )


def create_teacher(
    config: Config, runtime: Runtime, actor: EngineWorker, queue_address: str
) -> EngineWorker | ServedTeacherWorker | Teachers | None:
    """Place the teachers, if the run has any: in their pool, or behind a server.

    The policy's own engine, where it is its own teacher.
    """
    teacher = config.teacher
    if teacher is None:
        return None
    if is_self(teacher):
        return actor
    if teacher.url is not None:
        return runtime.create_group(
            ServedTeacherWorker, "queue", teacher=teacher, queue_address=queue_address, timeout_s=config.timeout_s
        )
    engines = {
        source: create_engine(
            config, runtime, path, queue_address, None, role="teacher", num_candidates=candidates_of(teacher)
        )
        for source, path in teacher_folders(teacher).items()
    }
    return Teachers(engines, engine_of(config, "teacher").world_size) if len(engines) > 1 else engines[""]


def create_critic(config: Config, runtime: Runtime, model_path: Path, queue_address: str) -> CriticWorker | None:
    """Place the critic in its pool, if the run has one."""
    section = config.critic
    if section is None:
        return None
    is_process = has_process_rewards(config)
    aggregation = Aggregation(name=config.algorithm.aggregation, norm_constant=config.rollout.max_new_tokens)
    return runtime.create_group(
        ProcessRewardWorker if is_process else CriticWorker,
        home_of(config, "critic"),
        backend=engine_of(config, "critic").backend,
        config=critic_config(config, section, model_path),
        loss=ProcessRewardLoss() if is_process else ValueLossFunction(clip=section.clip, aggregation=aggregation),
        inputs=IMAGES if takes_images(model_path) else (),
        masks_truncated=config.algorithm.mask_truncated,
        queue_address=queue_address,
        timeout_s=config.timeout_s,
    )
