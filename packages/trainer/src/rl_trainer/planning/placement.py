"""Placement plan: which roles live in which pool, how many processes and GPUs each pool takes, and its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainer.config.schema import ENGINE_POOL, ROLES, PoolSection
from rl_trainer.errors import PlanError
from rl_trainer.pipeline.roles import data_parallel_ranks, engine_of, has, home_of, pool_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_trainer.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Processes that roles share."""

    name: str
    """As in messages, and in Ray's tables."""
    num_workers: int
    """Processes."""
    gpus_per_worker: int
    """GPUs of each process, where there are any; 0: it computes on CPUs."""
    roles: tuple[str, ...]
    """What lives there; on one GPU all of them."""

    @property
    def num_gpus(self) -> int:
        """Of all its processes."""
        return self.num_workers * self.gpus_per_worker


def pools_of(config: Config) -> list[Pool]:
    """The pools of a run; where colocation is not decided, servers have a pool of their own."""
    homes: dict[str, list[str]] = {ENGINE_POOL: ["policy"]}
    for role in ROLES:
        if has(config, role):
            homes.setdefault(home_of(config, role), []).append(role)
    rollout = config.rollout
    if rollout.colocated:
        homes[ENGINE_POOL].append("rollout")
    pools = [
        Pool(name=name, num_workers=_size(config, name, roles), gpus_per_worker=1, roles=tuple(roles))
        for name, roles in homes.items()
    ]
    if not rollout.colocated:
        per_replica = rollout.parallel.num_ranks  # of one node: a bundle of Ray's is never spread
        replicas = {"num_workers": rollout.num_replicas, "gpus_per_worker": per_replica}
        pools.append(Pool(name="rollout", roles=("rollout",), **replicas))
    return [
        *pools,
        Pool(name="agent", num_workers=config.agent.num_workers, gpus_per_worker=0, roles=("agent workers",)),
        Pool(name="queue", num_workers=1, gpus_per_worker=0, roles=("queue",)),
    ]


def _size(config: Config, pool: str, roles: list[str]) -> int:
    return 1 if roles == ["reward"] else pool_size(config, pool)


_ABSENT: Mapping[str, str] = {
    "reference": "there is a KL penalty (algorithm.kl_coef) and the policy is not an adapter, its own reference",
    "critic": "a key of critic is set",
    "teacher": "there is a teacher.path without teacher.url",
    "reward": "reward.parts has a classifier with a path",
}


def check_placement(config: Config) -> None:
    """Check that what `placement` says does something, and that layouts divide the processes of their pools.

    Raises:
        PlanError: one does not.
    """
    per_update = config.batch.mini_batch_size * config.batch.group_size
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

    Args:
        config: Configuration of the run.
        memory: By pool and role, GiB of a GPU; empty where it is not known.
        gpus: That the run may use; 0: everything computes on CPUs.
    """
    for pool in pools_of(config):
        count = f"{pool.num_workers} process{'es' * (pool.num_workers > 1)}"
        if not pool.gpus_per_worker:
            where = f"{count} on CPUs of any node"
        elif gpus:
            where = f"{count} of {pool.gpus_per_worker} GPU{'s' * (pool.gpus_per_worker > 1)}"
        else:
            where = f"{count} (of {pool.gpus_per_worker} GPU each where there are GPUs)"
        known = memory.get(pool.name, {})
        if pool.name == "rollout" and (elastic := config.rollout.elastic) is not None:
            where += f", {elastic.min_replicas} to {elastic.max_replicas} by rollout.elastic ({elastic.policy})"
            where += ", and on the engine's GPUs while learning waits" * elastic.lend
        parts = (f"{role} {known[role]:.1f} GiB" if role in known else role for role in pool.roles)
        yield f"pool {pool.name}", f"{where}: {', '.join(parts)}"
