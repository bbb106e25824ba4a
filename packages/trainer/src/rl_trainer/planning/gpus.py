"""GPU plan of a run: its pools of processes, who shares a GPU, how many there are, and how weights then travel."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING

from rl_engine.registry import auto_precision, for_this_machine
from rl_engine.types import Precision
from rl_trainer.config.schema import ENGINE_POOL, ROLES, NodeSection, PoolSection
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipeline.roles import (
    data_parallel_ranks,
    engine_of,
    has,
    home_of,
    is_offloaded,
    of_each,
    policies_of,
    pool_of,
    pool_size,
    reward_models,
)
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.environments import engine_python
from rl_trainer.planning.memory import colocated_cache_bytes
from rl_trainer.runtime.base import ResourcePool
from rl_trainer.runtime.network import SHARED_MEMORY, scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_trainer.config import Config

_IPC = "cuda-ipc"
"""The transport between ends that share a GPU: nothing is copied to the host."""
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settle(config: Config) -> Config:
    """Settle the keys that a configuration leaves to the machine; keys that are set stay.

    - `engine.precision`, `engine.activation_checkpointing`: by the device, see `rl_engine.auto_precision`; a run with
      GPUs of a cluster computes in bfloat16.
    - `rollout.colocated`: servers share the engine's GPUs where the roles ask for more GPUs than there are, and where
      they can have them in turn.
    - `rollout.sleep`: not where this machine's GPUs have room for both; `rollout.kv_cache_bytes` is the server's then.
    - `weights_transport`: `cuda-ipc` between engine and server that share a GPU of this machine, else `shm`.
    """
    config = of_each(config, _with_precision)
    is_shared = False
    if any(own.rollout.colocated is None for own in policies_of(config).values()):
        wanted, there = sum(gpu_pools(config, colocated=False).values()), count_gpus(config)
        is_shared = 0 < there < wanted and why_apart(config, there) is None
    return of_each(config, lambda own: _with_servers(own, is_shared=is_shared))


def _with_precision(config: Config) -> Config:
    engine = config.engine
    if engine.precision == Precision.AUTO and count_gpus(config) > local_gpus():
        engine = replace(engine, precision=Precision.BFLOAT16)
    if engine.activation_checkpointing is None:
        engine = replace(engine, activation_checkpointing=not engine.treats_parts and count_gpus(config) > 0)
    return replace(config, engine=for_this_machine(engine))


def _with_servers(config: Config, *, is_shared: bool) -> Config:
    """Settle where servers are, unless that is set; `is_shared`: they share the engine's GPUs."""
    if config.rollout.colocated is None:
        config = replace(config, rollout=replace(config.rollout, colocated=is_shared))
    if config.rollout.colocated and config.rollout.sleep is None:
        cache = colocated_cache_bytes(config, None if "RAY_ADDRESS" in os.environ else gpu_gib())
        kept = {"sleep": True} if cache is None else {"sleep": False, "kv_cache_bytes": cache}
        config = replace(config, rollout=replace(config.rollout, **kept))
    if config.weights_transport is None:
        config = replace(config, weights_transport=_IPC if _can_share_memory(config) else SHARED_MEMORY)
    return config


def pools_of(config: Config) -> list[ResourcePool]:
    """The pools of a run, with the GPUs of a process where there are any.

    Where colocation is not decided, servers have a pool of their own. Each of several policies has its pools, and the
    first one those that reward models share with it.
    """
    pools: dict[str, ResourcePool] = {}
    for policy, own in policies_of(config).items():
        for pool in _pools_of_policy(own, has_rewards=not pools):
            named_pool = replace(pool, name=pool_of(policy, pool.name))
            pools[named_pool.name] = named_pool
    agent, queue = (section or NodeSection() for section in (config.placement.agent, config.placement.queue))
    return [
        *pools.values(),
        ResourcePool(name="agent", num_workers=config.agent.num_workers, roles=("agent workers",), **asdict(agent)),
        ResourcePool(name="queue", num_workers=1, roles=("queue",), **asdict(queue)),
    ]


def _pools_of_policy(config: Config, *, has_rewards: bool) -> list[ResourcePool]:
    homes: dict[str, list[str]] = {ENGINE_POOL: ["policy"]}
    for role in ROLES:
        if has(config, role) and (has_rewards or role != "reward"):
            homes.setdefault(home_of(config, role), []).append(role)
    rollout = config.rollout
    if rollout.colocated:
        homes[ENGINE_POOL].append("rollout")
    replicas = max((model.num_replicas for _, model in reward_models(config).values()), default=1)
    rewards = 1 if config.runtime == "inline" else replicas
    sizes = {name: rewards if roles == ["reward"] else pool_size(config, name) for name, roles in homes.items()}
    pools = [
        ResourcePool(name=name, num_workers=sizes[name], num_gpus=1, roles=tuple(roles))
        for name, roles in homes.items()
    ]
    if not rollout.colocated:
        per_replica = rollout.parallel.num_ranks  # of one node: a bundle of Ray's is never spread
        num_replicas = rollout.num_replicas
        pools.append(ResourcePool(name="rollout", num_workers=num_replicas, num_gpus=per_replica, roles=("rollout",)))
    return pools


def resource_pools(config: Config) -> list[ResourcePool]:
    """The pools of a job, with the GPUs that there are."""
    has_gpus = count_gpus(config) > 0
    engines = {pool_of(policy, ENGINE_POOL): own for policy, own in policies_of(config).items()}
    return [
        replace(
            pool,
            num_gpus=float(pool.num_gpus * has_gpus),
            python=engine_python(engines[pool.name]) if pool.name in engines else None,
            is_elastic=pool.name == "rollout" and config.rollout.elastic is not None,
        )
        for pool in pools_of(config)
    ]


def gpu_pools(config: Config, *, colocated: bool | None = None) -> dict[str, int]:
    """GPUs that each pool asks for; with `colocated` in the place of `rollout.colocated`."""
    if colocated is not None:
        config = of_each(config, lambda own: replace(own, rollout=replace(own.rollout, colocated=colocated)))
    return {pool.name: round(pool.num_workers * pool.num_gpus) for pool in pools_of(config) if pool.num_gpus}


def why_apart(config: Config, num_gpus: int) -> str | None:
    """Reason why servers cannot share the engine's GPUs, as the end of a sentence; None if they can."""
    found = (_why_policy_apart(own, num_gpus) for own in policies_of(config).values())
    if (reason := next(filter(None, found), None)) is not None:
        return reason
    shared = gpu_pools(config, colocated=True)
    if sum(shared.values()) > num_gpus:
        keys = "policies and placement" if config.policies else "placement"
        return f"the pools of {keys} ask for {named(shared)} without them: make those smaller"
    return None


def _why_policy_apart(config: Config, num_gpus: int) -> str | None:
    world_size, num_replicas = config.engine.world_size, config.rollout.num_replicas
    per_replica = config.rollout.parallel.num_ranks
    if not create_schedule(config).is_on_policy:
        return f"pipeline={config.pipeline} generates and trains at the same time: choose pipeline=sync"
    if config.batch.stream:
        return "batch.stream=true trains while the rest is generated: leave it out"
    if num_replicas * per_replica > world_size:
        replicas = f"rollout.num_replicas={num_replicas}" + (f" of {per_replica} GPUs" if per_replica > 1 else "")
        return f"{replicas} take more than engine.world_size={world_size}: make them that at most"
    if world_size > num_gpus:
        return f"the engine alone asks for {world_size}: make engine.world_size and rollout.num_replicas {num_gpus}"
    return None


def named(counts: Mapping[str, int]) -> str:
    """`engine 8, rollout 4`."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def count_gpus(config: Config) -> int:
    """Number of GPUs for the run: of the cluster at `RAY_ADDRESS`, else of this machine; inline at most one.

    Raises:
        PlacementError: there is no cluster at that address.
    """
    if config.runtime == "inline":
        return min(local_gpus(), 1)
    address = os.environ.get("RAY_ADDRESS")
    return local_gpus() if address is None else _gpus_of_cluster(address)


def local_gpus() -> int:
    """Number of GPUs of this machine that torch sees."""
    import torch

    return torch.cuda.device_count()


def gpu_gib() -> float | None:
    """Memory of this machine's smallest GPU, GiB; None without a GPU."""
    import torch

    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return min(sizes) / 2**30 if sizes else None


@cache
def _gpus_of_cluster(address: str) -> int:
    del address  # Ray reads it from the environment: it is here to be remembered by
    from rl_trainer.runtime.ray import cluster_gpus

    return cluster_gpus()


def _can_share_memory(config: Config) -> bool:
    """Whether engine and server are on one GPU of this machine, whose allocator can export memory."""
    settings = "".join(os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS).replace(" ", "").lower()
    return (
        bool(config.rollout.colocated)
        and config.rollout.parallel.num_ranks == 1  # the others' ranks compute on other GPUs than the sender's
        and (config.runtime == "inline" or "RAY_ADDRESS" not in os.environ)
        and local_gpus() > 0
        and "expandable_segments:true" not in settings
    )


def check_ipc(config: Config) -> None:
    """Check that a run which asks for `cuda-ipc` has engine and server on one GPU of this machine.

    Raises:
        ConfigError: it has not; says why.
    """
    ranks = config.rollout.parallel.num_ranks
    for is_so, why in (
        (count_gpus(config) == 0, "there is no GPU here"),
        (not config.rollout.colocated, "the servers have GPUs of their own (rollout.colocated)"),
        (ranks > 1, f"a replica of {ranks} GPUs computes on others than the sender's"),
    ):
        if scheme_of(config.weights_transport) == _IPC and is_so:
            raise ConfigError(
                f"weights_transport={config.weights_transport} is for engine and server on one GPU, and {why}; leave "
                "it out"
            )


def precision_facts(config: Config) -> list[tuple[str, str]]:
    """Line of the plan: the number format of engine and servers, and what it costs on this processor."""
    precision, (best, reason) = config.engine.precision, auto_precision()
    if count_gpus(config) or precision not in (Precision.FLOAT32, Precision.BFLOAT16):
        return [("precision", str(precision))]
    if precision == best:
        return [("precision", f"{precision}: {reason}")]
    slow = "; expect a tenth of the speed of float32" if precision == Precision.BFLOAT16 else ""
    return [("precision", f"{precision}, though {best} would suit: {reason}{slow}")]


def gpu_facts(config: Config) -> list[tuple[str, str]]:
    """Lines of the plan: which role has which GPUs; empty without GPUs."""
    there = count_gpus(config)
    if not there:
        return []
    roles = named(gpu_pools(config, colocated=False))
    if config.rollout.colocated:
        how = "in turn; who waits keeps its memory on the host" if is_offloaded(config) else "both in its memory"
        served = sum(o.rollout.num_replicas * o.rollout.parallel.num_ranks for o in policies_of(config).values())
        idle = sum(own.engine.world_size for own in policies_of(config).values()) - served
        how += f"; {idle} generate nothing" if idle else ""
        return [("GPUs", f"{there} for {roles}: colocated, {how}")]
    return [("GPUs", f"{there} for {roles}: each its own" if config.runtime == "ray" else f"1 for {roles}")]


def check_gpus(config: Config) -> None:
    """Check that there are the GPUs that the pools will ask for, on this machine or in the cluster that is joined.

    Raises:
        PlanError: there are fewer.
    """
    there = count_gpus(config)
    wanted = gpu_pools(config) if there else {}
    if config.runtime == "ray" and sum(wanted.values()) > there:
        obstacle = why_apart(config, there) or "rollout.colocated=false keeps servers on their own: leave it out"
        where, more = ("the cluster", "a larger one") if "RAY_ADDRESS" in os.environ else ("this machine", "a cluster")
        raise PlanError(
            f"the run asks for {sum(wanted.values())} GPUs ({named(wanted)}), and "
            f"{where} has {there}, which they cannot share because {obstacle}; or set RAY_ADDRESS of {more}"
        )


_ABSENT: Mapping[str, str] = {
    "reference": "there is a KL penalty (algorithm.kl_coef) and the policy is not an adapter, its own reference",
    "critic": "a key of critic is set",
    "teacher": "there is a teacher.path without teacher.url",
    "reward": "reward.parts has a judge or a classifier with a model.path",
}


def check_placement(config: Config) -> None:
    """Check that what `placement` says does something, and that layouts divide the processes of their pools.

    Raises:
        PlanError: one does not.
    """
    per_update = config.batch.mini_batch_size * config.batch.group_size
    for role in ("agent", "queue"):
        if config.runtime == "inline" and getattr(config.placement, role) is not None:
            raise PlanError(
                f"placement.{role} does nothing with runtime=inline, which has one process; use runtime=ray"
            )
    for role in ROLES:
        section: PoolSection | None = getattr(config.placement, role)
        if not has(config, role):
            if section is not None:
                raise PlanError(f"placement.{role} does nothing unless {_ABSENT[role]}; leave it out")
            continue
        if role == "reward":
            continue
        size = engine_of(config, role).world_size
        if config.runtime == "inline" and size > 1:
            raise PlanError(f"placement.{role}.num_gpus={size} needs its own processes: use runtime=ray")
        ranks = data_parallel_ranks(engine_of(config, role))
        if ranks > per_update:
            raise PlanError(
                f"the {role} has {ranks} data-parallel ranks in pool {home_of(config, role)!r}, and a mini-batch of "
                f"{config.batch.mini_batch_size} prompts x {config.batch.group_size} completions has no row for each; "
                f"lower placement.{role}.num_gpus"
            )
        if role == "critic" and per_update % ranks:
            raise PlanError(
                f"a mini-batch of {config.batch.mini_batch_size} prompts x {config.batch.group_size} completions = "
                f"{per_update} rows does not divide over the {ranks} data-parallel ranks of "
                f"placement.critic.num_gpus={size}"
            )


def placement_facts(
    config: Config, memory: Mapping[str, Mapping[str, float]], *, gpus: int
) -> Iterator[tuple[str, str]]:
    """(what, how) for the screen: a line for each pool, with its roles.

    `memory` has the GiB of a GPU by pool and role; without `gpus` everything computes on CPUs.
    """
    for pool in pools_of(config):
        count = f"{pool.num_workers} process{'es' * (pool.num_workers > 1)}"
        if not pool.num_gpus:
            cpus = f" of {pool.num_cpus:g} CPUs each" if pool.num_cpus != 1 else ""
            nodes = "any node" if pool.resource is None else f"nodes with the Ray resource {pool.resource}"
            where = f"{count}{cpus} on CPUs of {nodes}"
        elif gpus:
            where = f"{count} of {pool.num_gpus:g} GPU{'s' * (pool.num_gpus > 1)}"
        else:
            where = f"{count} (of {pool.num_gpus:g} GPU each where there are GPUs)"
        known = memory.get(pool.name, {})
        if pool.name == "rollout" and (elastic := config.rollout.elastic) is not None:
            where += f", {elastic.min_replicas} to {elastic.max_replicas} by rollout.elastic ({elastic.policy})"
            where += ", and on the engine's GPUs while learning waits" * elastic.lend
        parts = (f"{role} {known[role]:.1f} GiB" if role in known else role for role in pool.roles)
        yield f"pool {pool.name}", f"{where}: {', '.join(parts)}"
