"""Rules of `algorithm`, `critic` and `teacher`: settings that are fine alone and cannot work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_trainer import plugins
from rl_trainer.algorithms import ADVANTAGES, estimator_named, loss_named
from rl_trainer.algorithms.distillation import ALONE
from rl_trainer.algorithms.losses import check_loss
from rl_trainer.config.schema import CriticSection, refuse_unused
from rl_trainer.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from rl_trainer.config import Config
    from rl_trainer.config.schema import AlgorithmConfig


def check_algorithm(config: Config) -> None:
    """Check the estimator, the loss and their options against each other and the rest of the run.

    Raises:
        PlanError: settings that cannot work together.
        ConfigError: an algorithm that is not registered, or an option that it does not have.
    """
    _check_estimator(config)
    check_loss(config.algorithm)
    for name in config.algorithm.stages:
        plugins.stage_named(name)
    _check_given(config)
    _check_teacher(config)
    _check_kl(config)
    _check_correction(config.algorithm)


_OF_REWARDS = (
    "advantage",
    "advantage_options",
    "correction",
    "rejection",
    "rejection_counts",
    "top_entropy",
    "off_policy_mask",
)


def _check_estimator(config: Config) -> None:
    name = config.algorithm.advantage
    estimator = estimator_named(name)
    for need in estimator.reads:
        if (lacking := _lacking(config, need)) is not None:
            raise PlanError(f"algorithm.advantage={name} reads {need}, which takes {lacking}")
    for option in config.algorithm.advantage_options:
        if option not in estimator.options:
            raise ConfigError(
                f"algorithm.advantage_options.{option} is not read by algorithm.advantage={name}; its options are: "
                f"{', '.join(estimator.options) or 'none'}"
            )
    learned = ("values", "process_rewards")
    if config.critic is not None and not {*learned} & {*estimator.reads}:
        raise PlanError(
            f"the keys of critic do nothing with algorithm.advantage={name}; leave them out, or choose "
            f"one of {', '.join(name for name, e in sorted(ADVANTAGES.items()) if {*learned} & {*e.reads})}"
        )
    if config.critic is not None and config.critic.warmup_steps >= config.steps:
        raise PlanError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the policy none of steps={config.steps} to learn "
            "in; lower it, or raise steps"
        )
    if "process_rewards" in estimator.reads:
        _check_process_reward(config)
    for key in ("gamma", "lam"):
        if key not in estimator.keys:
            readers = [other for other, e in sorted(ADVANTAGES.items()) if key in e.keys]
            refuse_unused(config.algorithm, "algorithm", f"algorithm.advantage is one of {', '.join(readers)}", key)
    if config.algorithm.loss != ALONE and estimator.compares_group and config.batch.group_size < 2:
        raise PlanError(
            f"algorithm.advantage={name} compares completions of one prompt: batch.group_size must be at least 2"
        )
    if config.batch.dynamic_sampling and config.batch.group_size < 2:
        raise PlanError(
            "batch.dynamic_sampling compares completions of one prompt: batch.group_size must be at least 2"
        )


def _check_process_reward(config: Config) -> None:
    assert config.critic is not None, "prime has asked for one"
    if config.critic.clip != CriticSection().clip:
        raise PlanError("critic.clip is a value function's, and algorithm.advantage=prime has none; leave it out")
    if config.algorithm.ref_ema is not None:
        raise PlanError(
            "algorithm.advantage=prime compares with the start policy, which algorithm.ref_ema moves away; leave it out"
        )
    if config.reward.overlong_buffer:
        raise PlanError(
            "algorithm.advantage=prime learns outcomes from 0 to 1, and reward.overlong_buffer takes rewards below 0; "
            "leave it out"
        )


def _lacking(config: Config, need: str) -> str | None:
    """Missing setting for an input of an estimator; None if the run has it, or a stage may give it."""
    if need in {"greedy_rewards", "logprobs"}:
        return None
    if need in {"values", "process_rewards"} and config.critic is not None:
        return None
    if need == "components" and (config.reward.parts or config.reward.path):
        return None
    if need in {"ratio", "sum_pi_squared"} and config.algorithm.old_logprobs == "recompute":
        return None
    return {
        "values": "a critic: set a key of critic, such as critic.lr",
        "ratio": "the engine's log-probs and the sampler's: set algorithm.old_logprobs=recompute",
        "sum_pi_squared": "the engine's pass over the old policy: set algorithm.old_logprobs=recompute",
        "components": "a reward of parts: set reward.parts, or reward.path to a function that gives numbers by name",
        "process_rewards": "a process reward model: set a key of critic, such as critic.lr",
    }.get(need)


def _check_given(config: Config) -> None:
    """Check settings along with completions in the rows, whose policy is not the run's."""
    algorithm, given = config.algorithm, config.batch.given
    loss, estimator = loss_named(algorithm.loss), estimator_named(algorithm.advantage)
    if not given:
        if "is_given" in loss.reads:
            raise PlanError(
                f"algorithm.loss={algorithm.loss} mixes completions that rows give with sampled ones: set batch.given"
            )
        return
    if given >= config.batch.group_size:
        raise PlanError(
            f"batch.given={given} leaves none of batch.group_size={config.batch.group_size} completions to be sampled; "
            "lower it"
        )
    if algorithm.old_logprobs == "rollout" and "is_given" not in loss.reads:
        raise PlanError(
            f"batch.given={given} has completions that no server has sampled, which algorithm.old_logprobs=rollout "
            "takes for sure ones; set old_logprobs=recompute, or loss=luffy"
        )
    in_the_way = {
        f"algorithm.loss={algorithm.loss}, whose ratio is that to the sampler": loss.is_to_sampler,
        f"algorithm.advantage={algorithm.advantage}, which looks at the ratio to the sampler": (
            "ratio" in estimator.reads or (estimator.uses_weights and algorithm.correction != "none")
        ),
        "algorithm.rejection_counts=after, which compares with the sampler": algorithm.rejection_counts == "after",
        "engine.router_replay, which takes the experts that a server chose": config.engine.router_replay,
    }
    for what, is_so in in_the_way.items():
        if is_so:
            raise PlanError(f"batch.given={given} does not go with {what}; leave one of them out")


def _check_teacher(config: Config) -> None:
    """Check what goes with a teacher, and keys that distillation alone leaves without effect."""
    algorithm, teacher = config.algorithm, config.teacher
    if teacher is None:
        if algorithm.loss == ALONE:
            raise PlanError(f"algorithm.loss={ALONE} learns from a teacher alone: set teacher.path")
        return
    if teacher.path is None and config.engine.router_replay:
        raise PlanError(
            "engine.router_replay has the experts of the tokens that the server read, and a policy that is its own "
            "teacher reads teacher.context too; leave one of them out"
        )
    if teacher.url is not None and config.rollout.temperature != 1:
        raise PlanError(
            f"the server at teacher.url returns log-probs at temperature 1, and rollout.temperature="
            f"{config.rollout.temperature:g}; make it 1, or leave url out"
        )
    if algorithm.loss == ALONE:
        refuse_unused(
            algorithm, "algorithm", f"algorithm.loss is another than {ALONE}, which looks at no reward", *_OF_REWARDS
        )


def _check_kl(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.ref_ema is not None and config.engine.lora is not None:
        raise PlanError(
            "algorithm.ref_ema moves the weights of a reference, and with engine.lora the reference is the policy "
            "without its adapter, whose weights do not change; leave one of them out"
        )
    if algorithm.kl_in_reward and "components" in estimator_named(algorithm.advantage).reads:
        raise PlanError(
            f"algorithm.advantage={algorithm.advantage} reads the parts of a reward, which algorithm.kl_in_reward "
            "leaves as they are; add the penalty to the loss instead (kl_in_reward=false)"
        )


def _check_correction(algorithm: AlgorithmConfig) -> None:
    loss = loss_named(algorithm.loss)
    if loss.is_to_sampler and algorithm.correction != "none":
        raise PlanError(
            f"algorithm.correction={algorithm.correction} corrects twice with algorithm.loss={algorithm.loss}, whose "
            "ratio is that to the sampler; leave correction out"
        )
    if loss.is_to_sampler and loss.selects_tokens and algorithm.old_logprobs == "rollout":
        raise PlanError(
            f"algorithm.loss={algorithm.loss} compares the engine's log-probs before the update with the sampler's, "
            "and algorithm.old_logprobs=rollout computes none; set old_logprobs=recompute"
        )
    if algorithm.old_logprobs == "rollout" and algorithm.correction != "none" and loss_named(algorithm.loss).has_ratio:
        raise PlanError(
            f"algorithm.correction={algorithm.correction} with algorithm.old_logprobs=rollout corrects twice: the "
            f"ratio of algorithm.loss={algorithm.loss} is that to the sampler already; set "
            "algorithm.old_logprobs=recompute or correction=none"
        )
