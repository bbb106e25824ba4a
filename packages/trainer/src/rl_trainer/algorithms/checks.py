"""Which algorithms cannot work with the rest of a configuration, and which of their keys would do nothing with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_trainer.algorithms import ADVANTAGES, POLICY_LOSSES, estimator_named, loss_named
from rl_trainer.algorithms.distillation import ALONE
from rl_trainer.algorithms.rollout_correction import correction_bounds, rejection_bounds
from rl_trainer.config import AlgorithmConfig, CriticSection, StalenessSection, TeacherSection
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipelines.staleness import create_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_trainer.algorithms.advantages import Need
    from rl_trainer.config import Config


_OF_REWARDS = ("advantage", "correction", "rejection", "rejection_counts")
_MEANT: dict[str, tuple[Callable[[float], bool], str]] = {
    **{name: (lambda value: value >= 0, "0 or more") for name in ("clip_low", "clip_high", "kl_coef", "dro_beta")},
    **{name: (lambda value: value > 0, "above 0") for name in ("tau_pos", "tau_neg", "ratio_max")},
    "clip_dual": (lambda value: value == 0 or value > 1, "0 (off), or above 1"),
}
"""By option of our losses: whether a value can be meant, and which can."""
_LEAST_AGE = 3
"""Of a replayed group of one_step_off: a batch of step s has tokens of version s - 1, and is in the history when the
batch of step s + 2 is drawn."""


def check_algorithm(config: Config) -> None:
    """Check the estimator, the loss, the KL, the correction, and what the pipeline asks of them.

    Raises:
        PlanError: settings that cannot work together, or a key that would do nothing.
        ConfigError: an algorithm or an option of one that does not exist.
    """
    _check_estimator(config)
    _check_loss(config.algorithm)
    _check_teacher(config)
    _check_kl(config)
    _check_correction(config.algorithm)
    _check_pipeline(config)


def _check_estimator(config: Config) -> None:
    name = config.algorithm.advantage
    estimator = estimator_named(name)
    for need in estimator.needs:
        if (lacking := _lacking(config, need)) is not None:
            raise PlanError(f"algorithm.advantage={name} reads {need}, which takes {lacking}")
    learned = ("values", "process_rewards")
    if config.critic is not None and not {*learned} & {*estimator.needs}:
        raise PlanError(
            f"the keys of critic do nothing with algorithm.advantage={name}; leave them out, or choose "
            f"one of {', '.join(name for name, e in sorted(ADVANTAGES.items()) if {*learned} & {*e.needs})}"
        )
    if config.critic is not None and config.critic.warmup_steps >= config.steps:
        raise PlanError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the policy none of steps={config.steps} to learn "
            "in; lower it, or raise steps"
        )
    if "process_rewards" in estimator.needs:
        _check_process_reward(config)
    for key in ("gamma", "lam"):
        if key not in estimator.keys:
            readers = [other for other, e in sorted(ADVANTAGES.items()) if key in e.keys]
            _refuse(config.algorithm, f"algorithm.advantage is one of {', '.join(readers)}", key)
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


def _lacking(config: Config, need: Need) -> str | None:
    """What a run would have to have for an optional input of estimators; None if it has it."""
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
        "ratio": "the engine's log-probs beside the sampler's: set algorithm.old_logprobs=recompute",
        "sum_pi_squared": "the engine's pass over the old policy: set algorithm.old_logprobs=recompute",
        "components": "a reward of parts: set reward.parts, or reward.path to a function that gives numbers by name",
        "process_rewards": "a process reward model: set a key of critic, such as critic.lr",
    }[need]


def _check_loss(algorithm: AlgorithmConfig) -> None:
    loss = loss_named(algorithm.loss)
    for name in algorithm.loss_options:
        if name not in loss.options:
            raise ConfigError(
                f"algorithm.loss_options.{name} is not read by algorithm.loss={algorithm.loss}; its options are: "
                f"{', '.join(loss.options) or 'none'}"
            )
    options = {**loss.options, **algorithm.loss_options}
    for name, (is_meant, wanted) in _MEANT.items() if loss.compute is None else ():
        if name in options and not is_meant(value := options[name]):
            raise PlanError(f"algorithm.loss_options.{name}={value:g} cannot be meant; it has to be {wanted}")
    if loss.selects_tokens and not 0 < options["share"] <= 1:
        raise PlanError(f"algorithm.loss_options.share={options['share']:g} is a share of the tokens; give 0 to 1")


def _check_teacher(config: Config) -> None:
    """What goes with a teacher, and what learning from it alone leaves without a meaning."""
    algorithm, teacher = config.algorithm, config.teacher
    if teacher is None:
        if algorithm.loss == ALONE:
            raise PlanError(f"algorithm.loss={ALONE} learns from a teacher alone: set teacher.path")
        return
    for name, kinds in (("forward_weight", ("mixed",)), ("num_candidates", ("forward", "mixed"))):
        is_set = getattr(teacher, name) != getattr(TeacherSection(path=""), name)
        if is_set and teacher.divergence not in kinds:
            raise PlanError(
                f"teacher.{name}={getattr(teacher, name)} does nothing unless teacher.divergence is "
                f"{' or '.join(kinds)}; leave it out"
            )
    if teacher.url is None and teacher.model is not None:
        raise PlanError(f"teacher.model={teacher.model} names a model of a server, and teacher.url is not set; set it")
    if teacher.url is not None and teacher.divergence != "reverse":
        raise PlanError(
            f"teacher.divergence={teacher.divergence} compares the teacher's likeliest tokens, which the server at "
            "teacher.url does not tell of a prompt; choose reverse, or leave url out"
        )
    if teacher.url is not None and config.rollout.temperature != 1:
        raise PlanError(
            f"the server at teacher.url tells log-probs at temperature 1, and rollout.temperature="
            f"{config.rollout.temperature:g}; make it 1, or leave url out"
        )
    if algorithm.loss == ALONE:
        _refuse(algorithm, f"algorithm.loss is another than {ALONE}, which looks at no reward", *_OF_REWARDS)


def _check_kl(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.kl_coef == 0:
        _refuse(algorithm, "algorithm.kl_coef is positive", "kl_in_reward", "kl_estimator", "ref_ema")
    if algorithm.ref_ema is not None and config.engine.lora is not None:
        raise PlanError(
            "algorithm.ref_ema moves the weights of a reference, and with engine.lora the reference is the policy "
            "without its adapter, whose weights stand still; leave one of them out"
        )
    if not algorithm.kl_in_reward:
        _refuse(algorithm, "algorithm.kl_in_reward is set", "kl_target")
        return
    if algorithm.kl_estimator.endswith("+"):
        raise PlanError(
            f"algorithm.kl_estimator={algorithm.kl_estimator} is a gradient's, and a penalty in the rewards has none; "
            f"set kl_estimator={algorithm.kl_estimator[:-1]}"
        )
    if "components" in estimator_named(algorithm.advantage).needs:
        raise PlanError(
            f"algorithm.advantage={algorithm.advantage} reads the parts of a reward, which algorithm.kl_in_reward "
            "leaves as they are; add the penalty to the loss instead (kl_in_reward=false)"
        )


def _check_correction(algorithm: AlgorithmConfig) -> None:
    if algorithm.rejection == "none":
        _refuse(algorithm, "algorithm.rejection is chosen", "rejection_bounds", "rejection_counts")
    if algorithm.correction == "none":
        _refuse(algorithm, "algorithm.correction is chosen", "correction_bounds")
    _check_bounds("correction", algorithm.correction, correction_bounds(algorithm), has_low="icepop")
    _check_bounds("rejection", algorithm.rejection, rejection_bounds(algorithm), has_low="k1")
    if algorithm.old_logprobs == "recompute":
        return
    if algorithm.rejection_counts == "after":
        raise PlanError(
            "algorithm.rejection_counts=after counts what is left before the update, and with "
            "algorithm.old_logprobs=rollout the update itself tells what is rejected; set rejection_counts=before, or "
            "old_logprobs=recompute"
        )
    if algorithm.correction != "none" and loss_named(algorithm.loss).has_ratio:
        without = [name for name, loss in POLICY_LOSSES.items() if not loss.has_ratio]
        raise PlanError(
            f"algorithm.correction={algorithm.correction} with algorithm.old_logprobs=rollout corrects twice: the "
            f"ratio of algorithm.loss={algorithm.loss} is that to the sampler already; set "
            f"algorithm.old_logprobs=recompute, correction=none, or loss={' or '.join(without)}"
        )


def _check_bounds(key: str, scheme: str, bounds: tuple[float, float], *, has_low: str) -> None:
    low, high = bounds
    if low >= high:
        raise PlanError(f"algorithm.{key}_bounds={[low, high]} are no bounds: the first has to be the lower one")
    if scheme != "none" and not scheme.endswith(has_low) and low > 0:
        raise PlanError(
            f"algorithm.{key}={scheme} has an upper bound alone, but algorithm.{key}_bounds={[low, high]}; give "
            f"[0, {high:g}]"
        )


def _check_pipeline(config: Config) -> None:
    """What learning from older weights, or from another distribution than the engine's, takes."""
    algorithm = config.algorithm
    if config.rollout.top_p < 1.0 and algorithm.old_logprobs == "recompute":
        raise PlanError(
            "rollout.top_p < 1 makes the sampler's distribution differ from the one the engine scores; set top_p=1, "
            "or algorithm.old_logprobs=rollout"
        )
    if config.pipeline != "fully_async" and config.staleness != StalenessSection():
        raise PlanError(f"the keys of staleness do nothing with pipeline={config.pipeline}; leave them out")
    if config.batch.replay is not None:
        _check_replay(config)
    if config.pipeline == "fully_async":
        create_policy(config)
        if config.batch.over_sampling:
            raise PlanError(
                f"batch.over_sampling={config.batch.over_sampling:g} does nothing with pipeline=fully_async, which "
                "begins groups ahead and waits for none that may be late: leave it out, and see staleness"
            )
    is_off_policy = config.pipeline == "one_step_off" or config.staleness.max_staleness > 0
    if config.pipeline != "sync" and is_off_policy:
        _require_off_policy(algorithm, f"pipeline={config.pipeline}")


def _check_replay(config: Config) -> None:
    replay = config.batch.replay
    assert replay is not None, "the caller has checked it"
    if config.pipeline == "fully_async":
        raise PlanError(
            "batch.replay goes with pipeline=sync or one_step_off: how many fresh groups a step then needs depends on "
            "what earlier steps had to teach, and pipeline=fully_async releases groups ahead by a fixed number per "
            "step, which bounds their age; leave it out"
        )
    if config.pipeline == "one_step_off" and replay.max_age < _LEAST_AGE:
        raise PlanError(
            f"batch.replay.max_age={replay.max_age} does nothing with pipeline=one_step_off: the next batch is made "
            f"while this one trains, so that what is replayed is {_LEAST_AGE} versions old; give {_LEAST_AGE} or more"
        )
    if int(replay.share * config.batch.batch_size) == 0:
        raise PlanError(
            f"batch.replay.share={replay.share:g} of batch.batch_size={config.batch.batch_size} groups is "
            "less than one, so that it does nothing; raise it, or leave batch.replay out"
        )
    _require_off_policy(config.algorithm, "batch.replay")


def _require_off_policy(algorithm: AlgorithmConfig, what: str) -> None:
    if algorithm.correction != "none":
        return
    if algorithm.old_logprobs == "recompute":
        raise PlanError(
            f"{what} learns from tokens of older weights, which algorithm.old_logprobs=recompute "
            "would treat as the engine's own; set algorithm.correction=tis (or icepop), or "
            "algorithm.old_logprobs=rollout"
        )
    if not loss_named(algorithm.loss).has_ratio:
        raise PlanError(
            f"{what} learns from tokens of older weights, and algorithm.loss={algorithm.loss} has no ratio that would "
            "tell; set algorithm.correction=tis (or icepop)"
        )


def _refuse(algorithm: AlgorithmConfig, unless: str, *keys: str) -> None:
    """Refuse keys that are set and would do nothing."""
    default = AlgorithmConfig()
    for key in keys:
        value, usual = getattr(algorithm, key), getattr(default, key)
        if value != usual:
            raise PlanError(
                f"algorithm.{key}={value} does nothing unless {unless}; leave it out, or set it back to {usual}"
            )
