"""The batch plan: every count of a run, computed from the configuration and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainer.algorithms import estimator_named, loss_named
from rl_trainer.algorithms.checks import check_algorithm
from rl_trainer.config import DataConfig
from rl_trainer.data.options import check_options
from rl_trainer.data.records import HUB, is_saved_dataset
from rl_trainer.errors import PlanError
from rl_trainer.rewards.checks import check_reward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_trainer.config import Config


_ONE_GENERATION = ("single_turn", "reasoning_gym")
"""Loops whose completions are one generation, at most `rollout.max_new_tokens` long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one training step consists of."""

    prompts: int
    """Prompts per step."""
    completions: int
    """Completions per step."""
    optimizer_steps: int
    """Optimizer steps per step."""
    completions_per_optimizer_step: int
    """Completions that one gradient is made of."""
    completions_per_rank: int
    """Completions of one optimizer step on one engine rank."""
    max_sequence_tokens: int
    """Longest prompt plus completion."""
    total_completions: int
    """Completions of the whole run."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """(what, how many) for the screen."""
        yield "prompts per step", f"{self.prompts}"
        yield "completions per step", f"{self.completions}"
        yield "optimizer steps per step", f"{self.optimizer_steps} of {self.completions_per_optimizer_step} completions"
        yield "completions per engine rank", f"{self.completions_per_rank} per optimizer step"
        yield "longest sequence", f"{self.max_sequence_tokens} tokens"
        yield "completions in all", f"{self.total_completions:,}"


def make_plan(config: Config) -> BatchPlan:
    """Compute and check the plan.

    Raises:
        PlanError: numbers that do not divide, or settings that cannot work together.
        ConfigError: an algorithm that is not registered.
    """
    batch, engine = config.batch, config.engine
    if batch.batch_size % batch.mini_batch_size:
        raise PlanError(
            f"batch.batch_size={batch.batch_size} prompts cannot be cut into mini-batches of "
            f"batch.mini_batch_size={batch.mini_batch_size}; "
            "choose a divisor"
        )
    per_optimizer_step = batch.mini_batch_size * batch.group_size
    if per_optimizer_step % engine.world_size:
        raise PlanError(
            f"a mini-batch of {batch.mini_batch_size} prompts x {batch.group_size} completions = "
            f"{per_optimizer_step} rows does not divide over "
            f"engine.world_size={engine.world_size} ranks"
        )
    longest, sum_ = longest_sequence(config)
    if longest > batch.max_tokens_per_gpu:
        raise PlanError(
            f"a sequence may have {sum_} = {longest} tokens, more than "
            f"batch.max_tokens_per_gpu={batch.max_tokens_per_gpu} of a micro-batch; raise it or lower the others"
        )
    if longest > config.rollout.max_model_len:
        raise PlanError(
            f"a sequence may have {sum_} = {longest} tokens, more than rollout.max_model_len="
            f"{config.rollout.max_model_len}"
        )
    _check_data(config.data)
    check_reward(config.reward)
    if config.reward.overlong_buffer > config.rollout.max_new_tokens:
        raise PlanError(
            f"reward.overlong_buffer={config.reward.overlong_buffer} is longer than the longest completion, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    check_algorithm(config)
    _check_layout(config)
    return BatchPlan(
        prompts=batch.batch_size,
        completions=batch.batch_size * batch.group_size,
        optimizer_steps=batch.batch_size // batch.mini_batch_size,
        completions_per_optimizer_step=per_optimizer_step,
        completions_per_rank=per_optimizer_step // engine.world_size,
        max_sequence_tokens=longest,
        total_completions=config.steps * batch.batch_size * batch.group_size,
    )


def longest_sequence(config: Config) -> tuple[int, str]:
    """Tokens of the longest sequence that a run may make, and the keys that they come from.

    A loop of several turns is bounded by its own `max_completion_tokens`, or else by what a server takes.
    """
    prompt, agent = config.data.max_prompt_tokens, config.agent
    if agent.loop in _ONE_GENERATION:
        return prompt + config.rollout.max_new_tokens, "data.max_prompt_tokens + rollout.max_new_tokens"
    if (completion := agent.options.get("max_completion_tokens")) is not None:
        return prompt + int(completion), "data.max_prompt_tokens + agent.options.max_completion_tokens"
    return config.rollout.max_model_len, f"(agent.loop={agent.loop} sets no bound) rollout.max_model_len"


def has_reference(config: Config) -> bool:
    """Whether anything is compared with the start policy, or with what it has become."""
    return config.algorithm.kl_coef > 0 or has_process_rewards(config)


def has_old_pass(config: Config) -> bool:
    """Whether the engine scores a batch before it is learned from (`algorithm.old_logprobs=recompute`).

    With one mini-batch the update's own pass tells the same, unless something reads them before.
    """
    algorithm, batch = config.algorithm, config.batch
    needs = estimator_named(algorithm.advantage).needs
    is_read_before = (
        bool({"ratio", "logprobs", "sum_pi_squared"} & {*needs})
        or (algorithm.kl_in_reward and algorithm.kl_coef > 0)
        or loss_named(algorithm.loss).selects_tokens
        or (algorithm.rejection != "none" and algorithm.rejection_counts == "after")
    )
    return algorithm.old_logprobs == "recompute" and (batch.mini_batch_size < batch.batch_size or is_read_before)


def has_process_rewards(config: Config) -> bool:
    """Whether the critic is an implicit process reward model."""
    return "process_rewards" in estimator_named(config.algorithm.advantage).needs


def _check_layout(config: Config) -> None:
    """Processes and who shares them."""
    if config.rollout.colocated and config.pipeline != "sync":
        raise PlanError(
            f"pipeline={config.pipeline} generates and trains at the same time, which rollout.colocated=true rules "
            "out; choose pipeline=sync, or colocated=false"
        )
    if config.rollout.colocated and config.rollout.num_replicas != config.engine.world_size:
        raise PlanError(
            f"rollout.colocated=true puts one server beside every rank of the engine, but rollout.num_replicas="
            f"{config.rollout.num_replicas} and engine.world_size={config.engine.world_size}; make them equal"
        )
    layout, world_size = config.engine.parallel, config.engine.world_size
    if world_size % (layout.tp * layout.pp * layout.cp):
        raise PlanError(
            f"engine.world_size={world_size} is no multiple of engine.parallel tp x pp x cp = "
            f"{layout.tp} x {layout.pp} x {layout.cp}"
        )
    sizes = {"engine.world_size": world_size, "agent.num_workers": config.agent.num_workers}
    for key, size in (sizes | {"rollout.num_replicas": config.rollout.num_replicas}).items():
        if config.runtime == "inline" and size > 1:
            raise PlanError(f"{key}={size} needs processes of its own: use runtime=ray")
    if config.runtime == "inline" and config.pipeline != "sync":
        raise PlanError(f"pipeline={config.pipeline} generates and trains at the same time, which takes runtime=ray")


def _check_data(data: DataConfig) -> None:
    """Keys of `data` that would do nothing with this source."""
    default = DataConfig()
    is_file = data.format in {"rows", "gsm8k"}
    is_streamed = is_file and data.options.get("stream_buffer") is not None
    is_dataset = is_file and data.path is not None and (data.path.startswith(HUB) or is_saved_dataset(data.path))

    def refuse(is_used: bool, why: str, *names: str) -> None:
        for name in names:
            if not is_used and getattr(data, name) != getattr(default, name):
                raise PlanError(f"data.{name}={getattr(data, name)!r} does nothing {why}; leave it out")

    with_format = f"with data.format={data.format}"
    refuse(data.format != "reasoning_gym", with_format, "path", "eval_path")
    refuse(is_file, with_format, "mixture")
    refuse(not data.mixture, "beside data.mixture", "path", "eval_path")
    if data.curriculum is not None and (is_streamed or data.mixture):
        raise PlanError(
            "data.curriculum chooses among all rows of one dataset, so it goes with neither data.options.stream_buffer "
            "nor data.mixture; leave it out"
        )
    if data.curriculum is not None and data.curriculum.pass_rate[0] >= data.curriculum.pass_rate[1]:
        raise PlanError(f"data.curriculum.pass_rate={list(data.curriculum.pass_rate)}: the first has to be the lower")
    uses_datasets = is_dataset or any(
        part.path.startswith(HUB) or is_saved_dataset(part.path) for part in data.mixture.values()
    )
    refuse(not is_dataset, "with a dataset of the datasets package: set data.options.eval_split", "eval_path")
    check_options(data, uses_datasets=uses_datasets)
