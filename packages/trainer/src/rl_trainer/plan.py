"""The batch plan: every count of a run, computed from the configuration and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from rl_trainer.config import AsyncSection
from rl_trainer.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_trainer.config import Config

_NEEDS_A_GROUP = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "grpo_passk", "opo", "gpg")


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
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > batch.max_tokens_per_gpu:
        raise PlanError(
            f"a sequence may have data.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens, more than "
            f"batch.max_tokens_per_gpu={batch.max_tokens_per_gpu} of a micro-batch; raise it or lower the others"
        )
    if longest > config.rollout.max_model_len:
        raise PlanError(
            f"a sequence may have {longest} tokens, more than rollout.max_model_len={config.rollout.max_model_len}"
        )
    _check_algorithm(config)
    return BatchPlan(
        prompts=batch.batch_size,
        completions=batch.batch_size * batch.group_size,
        optimizer_steps=batch.batch_size // batch.mini_batch_size,
        completions_per_optimizer_step=per_optimizer_step,
        completions_per_rank=per_optimizer_step // engine.world_size,
        max_sequence_tokens=longest,
        total_completions=config.steps * batch.batch_size * batch.group_size,
    )


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.advantage not in ADVANTAGES:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage!r} is not registered; there are {', '.join(sorted(ADVANTAGES))}"
        )
    if algorithm.loss not in POLICY_LOSSES:
        raise ConfigError(
            f"algorithm.loss={algorithm.loss!r} is not a policy loss; there are {', '.join(POLICY_LOSSES)}"
        )
    if algorithm.advantage in _NEEDS_A_GROUP and config.batch.group_size < 2:
        raise PlanError(
            f"algorithm.advantage={algorithm.advantage} compares completions of one prompt: batch.group_size must be "
            "at least 2"
        )
    if config.batch.dynamic_sampling and config.batch.group_size < 2:
        raise PlanError(
            "batch.dynamic_sampling compares completions of one prompt: batch.group_size must be at least 2"
        )
    if algorithm.correction != "none" and algorithm.old_logprobs == "rollout":
        raise PlanError(
            f"algorithm.correction={algorithm.correction} corrects from the sampler's log-probs to the engine's, which "
            "algorithm.old_logprobs=rollout never computes; set algorithm.old_logprobs=recompute"
        )
    if config.pipeline != "sync":
        _check_off_policy(config)
    if config.pipeline != "fully_async" and config.fully_async != AsyncSection():
        raise PlanError(f"the keys of fully_async do nothing with pipeline={config.pipeline}; leave them out")
    layout, world_size = config.engine.parallel, config.engine.world_size
    if world_size % (layout.tp * layout.pp * layout.cp):
        raise PlanError(
            f"engine.world_size={world_size} is no multiple of engine.parallel tp x pp x cp = "
            f"{layout.tp} x {layout.pp} x {layout.cp}"
        )
    if config.runtime == "inline" and config.engine.world_size > 1:
        raise PlanError(f"engine.world_size={config.engine.world_size} needs processes of its own: use runtime=ray")
    if config.rollout.top_p < 1.0 and algorithm.old_logprobs == "recompute":
        raise PlanError(
            "rollout.top_p < 1 makes the sampler's distribution differ from the one the engine scores; set top_p=1, "
            "or algorithm.old_logprobs=rollout"
        )


def _check_off_policy(config: Config) -> None:
    if config.runtime == "inline":
        raise PlanError(f"pipeline={config.pipeline} generates and trains at the same time, which takes runtime=ray")
    if config.pipeline == "fully_async" and config.fully_async.max_staleness == 0:
        return
    if config.algorithm.old_logprobs == "recompute" and config.algorithm.correction == "none":
        raise PlanError(
            f"pipeline={config.pipeline} learns from tokens of older weights, which algorithm.old_logprobs=recompute "
            "would treat as the engine's own; set algorithm.correction=tis (or icepop), or "
            "algorithm.old_logprobs=rollout"
        )
