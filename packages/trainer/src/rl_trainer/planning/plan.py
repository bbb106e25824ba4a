"""The batch plan: every count of a run, computed from the configuration and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from rl_engine.types import LoraExport
from rl_trainer import plugins
from rl_trainer.algorithms.rules import check_algorithm
from rl_trainer.data.datasets import check_data
from rl_trainer.errors import PlanError, naming_policy
from rl_trainer.pipeline.roles import data_parallel_ranks, is_offloaded, longest_sequence, policies_of, update_barrier
from rl_trainer.pipeline.rules import check_elastic, check_pipeline, check_policies
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.gpus import check_placement
from rl_trainer.rewards.scorer import check_rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from rl_trainer.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Batch plan: counts of one training step, and of the run."""

    completions: int
    """Completions per step."""
    optimizer_steps: int
    """Optimizer steps per step."""
    completions_per_optimizer_step: int
    """Completions that one gradient is made of."""
    completions_per_rank: int
    """Completions of one optimizer step on one data-parallel rank of the engine."""
    max_sequence_tokens: int
    """Longest prompt plus completion."""
    total_completions: int
    """Completions of the whole run."""

    def lines(self, config: Config) -> Iterator[tuple[str, str]]:
        """Lines of the plan: (name, count)."""
        yield "prompts per step", f"{config.batch.batch_size}"
        yield "completions per step", f"{self.completions}"
        yield "optimizer steps per step", f"{self.optimizer_steps} of {self.completions_per_optimizer_step} completions"
        yield "completions per data-parallel rank", f"{self.completions_per_rank} per optimizer step"
        if config.batch.stream:
            key = update_barrier(config)
            how = "scored and learned from" if key is None else f"scored; learned from once all are ({key})"
            yield "mini-batches as they come", how
        yield "longest sequence", f"{self.max_sequence_tokens} tokens"
        yield "completions in all", f"{self.total_completions:,}"


def _batch_plan(config: Config) -> BatchPlan:
    """Counts of a configuration; raises PlanError as `make_plan`."""
    batch, engine = config.batch, config.engine
    if batch.batch_size % batch.mini_batch_size:
        raise PlanError(
            f"batch.batch_size={batch.batch_size} prompts cannot be cut into mini-batches of "
            f"batch.mini_batch_size={batch.mini_batch_size}; choose a divisor"
        )
    per_optimizer_step = batch.mini_batch_size * batch.group_size
    ranks = data_parallel_ranks(engine)
    if per_optimizer_step % ranks:
        raise PlanError(
            f"a mini-batch of {batch.mini_batch_size} prompts x {batch.group_size} completions = "
            f"{per_optimizer_step} rows does not divide over {ranks} data-parallel ranks "
            f"(engine.world_size={engine.world_size} / tp x pp x cp x sp = {engine.world_size // ranks})"
        )
    longest, sum_ = longest_sequence(config)
    if longest > engine.max_tokens_per_gpu:
        raise PlanError(
            f"a sequence may have {sum_} = {longest} tokens, more than "
            f"engine.max_tokens_per_gpu={engine.max_tokens_per_gpu} of a micro-batch; raise it or lower the others"
        )
    if longest > config.rollout.max_model_len:
        raise PlanError(
            f"a sequence may have {sum_} = {longest} tokens, more than rollout.max_model_len="
            f"{config.rollout.max_model_len}"
        )
    return BatchPlan(
        completions=batch.batch_size * batch.group_size,
        optimizer_steps=batch.batch_size // batch.mini_batch_size,
        completions_per_optimizer_step=per_optimizer_step,
        completions_per_rank=per_optimizer_step // ranks,
        max_sequence_tokens=longest,
        total_completions=config.steps * batch.batch_size * batch.group_size,
    )


def show_table(console: Console, title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print lines of (name, text) as a table."""
    table = Table(title=title, show_header=False)
    for name, value in facts:
        table.add_row(name, value)
    console.print(table)


def make_plan(config: Config) -> BatchPlan:
    """Compute the plan, and check what the sections ask of each other.

    Raises:
        PlanError: numbers that do not divide, or settings that cannot work together.
        ConfigError: an algorithm that is not registered, or an option that it has not.
    """
    check_policies(config)
    plans, policies = list[BatchPlan](), policies_of(config).items()
    for name, own in policies:
        with naming_policy(name):
            plans.append(_batch_plan(own))
    check_data(config.data)
    for name, part in config.reward.parts.items():
        check_rule(f"reward.parts.{name}", part)
    if config.reward.overlong_buffer > config.rollout.max_new_tokens:
        raise PlanError(
            f"reward.overlong_buffer={config.reward.overlong_buffer} is longer than the longest completion, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    if config.batch.filter is not None:
        plugins.filter_named(config.batch.filter)
    for name, own in policies:
        with naming_policy(name):
            check_algorithm(own)
            check_pipeline(own)
            _check_layout(own)
            check_placement(own)
    return plans[0]


def _check_layout(config: Config) -> None:
    """Check the layout: processes, GPUs, and which roles share them."""
    schedule = create_schedule(config)
    if config.rollout.colocated and not schedule.is_on_policy:
        raise PlanError(
            f"pipeline={config.pipeline} generates and trains at the same time, which rollout.colocated=true rules "
            "out; choose pipeline=sync, or colocated=false"
        )
    replica, num_replicas = config.rollout.parallel, config.rollout.num_replicas
    if config.rollout.colocated and num_replicas * replica.num_ranks > config.engine.world_size:
        raise PlanError(
            f"rollout.colocated=true puts the replicas on the GPUs of the engine, but rollout.num_replicas="
            f"{num_replicas} of tp x pp x dp = {replica.num_ranks} GPUs are more than engine.world_size="
            f"{config.engine.world_size}; make the product at most that"
        )
    if config.rollout.elastic is not None:
        check_elastic(config, config.rollout.elastic, schedule)
    lora = config.engine.lora
    if lora is not None and lora.export == LoraExport.ADAPTER and is_offloaded(config):
        raise PlanError(
            "engine.lora.export=adapter sends the adapter alone, and rollout.colocated=true gives the memory of the "
            "other weights back; leave the export out, or the servers apart"
        )
    sizes = {"engine.world_size": config.engine.world_size, "agent.num_workers": config.agent.num_workers}
    for key, size in (sizes | {"rollout.num_replicas": config.rollout.num_replicas}).items():
        if config.runtime == "inline" and size > 1:
            raise PlanError(f"{key}={size} needs its own processes: use runtime=ray")
    if config.runtime == "inline" and not schedule.is_on_policy:
        raise PlanError(f"pipeline={config.pipeline} generates and trains at the same time, which takes runtime=ray")
