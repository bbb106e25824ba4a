"""Validation across sections of a configuration: settings that are fine alone and cannot work together.

What a section asks of its own keys stands with the section (`config/schema.py`, and the package that reads it); what
the machine, the model's folder and the backends say is in `preflight.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_engine.types import LoraExport
from rl_trainer import plugins
from rl_trainer.algorithms import ADVANTAGES, estimator_named, loss_named
from rl_trainer.algorithms.distillation import ALONE
from rl_trainer.algorithms.losses import check_loss
from rl_trainer.config.schema import CriticSection, StalenessSection, refuse_unused
from rl_trainer.data.datasets import check_data
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipeline.elastic import create_policy as create_elastic
from rl_trainer.pipeline.roles import has_old_pass, has_reference, is_offloaded, reads_old_pass, update_barrier
from rl_trainer.pipeline.staleness import Schedule, create_schedule
from rl_trainer.planning.placement import check_placement
from rl_trainer.planning.plan import BatchPlan
from rl_trainer.rewards.scorer import check_rule

if TYPE_CHECKING:
    from rl_trainer.config import AlgorithmConfig, Config
    from rl_trainer.config.schema import ElasticSection

_OF_REWARDS = (
    "advantage",
    "advantage_options",
    "correction",
    "rejection",
    "rejection_counts",
    "top_entropy",
    "off_policy_mask",
)


def make_plan(config: Config) -> BatchPlan:
    """Compute the plan, and check what the sections ask of each other.

    Raises:
        PlanError: numbers that do not divide, or settings that cannot work together.
        ConfigError: an algorithm that is not registered, or an option that it has not.
    """
    plan = BatchPlan.of(config)
    check_data(config.data)
    for name, part in config.reward.parts.items():
        check_rule(f"reward.parts.{name}", part)
    if config.reward.overlong_buffer > config.rollout.max_new_tokens:
        raise PlanError(
            f"reward.overlong_buffer={config.reward.overlong_buffer} is longer than the longest completion, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}"
        )
    _check_estimator(config)
    check_loss(config.algorithm)
    for name in config.algorithm.stages:
        plugins.stage_named(name)
    _check_given(config)
    _check_teacher(config)
    _check_kl(config)
    _check_correction(config.algorithm)
    _check_pipeline(config)
    _check_layout(config)
    check_placement(config)
    return plan


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
    if config.batch.filter is not None:
        plugins.filter_named(config.batch.filter)


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
        "ratio": "the engine's log-probs beside the sampler's: set algorithm.old_logprobs=recompute",
        "sum_pi_squared": "the engine's pass over the old policy: set algorithm.old_logprobs=recompute",
        "components": "a reward of parts: set reward.parts, or reward.path to a function that gives numbers by name",
        "process_rewards": "a process reward model: set a key of critic, such as critic.lr",
    }.get(need)


def _check_given(config: Config) -> None:
    """Check settings beside completions that the rows give, whose policy is not the run's."""
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
            f"the server at teacher.url tells log-probs at temperature 1, and rollout.temperature="
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
            "without its adapter, whose weights stand still; leave one of them out"
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


def _check_pipeline(config: Config) -> None:
    """Check the schedule, and what learning from older weights or another distribution needs."""
    if config.rollout.top_p < 1.0:
        raise PlanError(
            f"rollout.top_p={config.rollout.top_p:g} samples from a part of the vocabulary and the engine scores "
            "all of it, so that their log-probs never agree; set top_p=1"
        )
    if config.pipeline in ("sync", "one_step_off") and config.staleness not in (
        StalenessSection(),
        StalenessSection(max_staleness=0),
    ):
        raise PlanError(
            f"pipeline={config.pipeline} takes staleness.max_staleness=0 (the losses of sync) and no other key of "
            "staleness; leave them out, or choose pipeline=fully_async"
        )
    schedule = create_schedule(config)
    if config.batch.replay is not None:
        _check_replay(config, schedule)
    if config.batch.stream:
        _check_stream(config, schedule)
    if config.batch.over_sampling and not schedule.settles_before_sync:
        raise PlanError(
            f"batch.over_sampling={config.batch.over_sampling:g} does nothing with pipeline={config.pipeline}, which "
            "begins groups ahead and waits for none that may be late: leave it out, and see staleness"
        )
    if schedule.lag or schedule.policy.max_staleness:
        _require_off_policy(config, f"pipeline={config.pipeline}")


def _check_stream(config: Config, schedule: Schedule) -> None:
    """Check that streamed mini-batches have the gradients of a whole batch, and that streaming does something."""
    batch, barrier = config.batch, update_barrier(config)
    has_scores = has_old_pass(config) or has_reference(config) or bool(config.algorithm.stages)
    has_scores = has_scores or config.critic is not None or config.teacher is not None
    in_the_way = {
        "rollout.colocated=true, whose servers have to end before the engine may begin": bool(config.rollout.colocated),
        f"pipeline={config.pipeline}, which generates ahead": not schedule.is_on_policy,
        f"batch.mini_batch_size={batch.mini_batch_size}, which is the whole batch: make it smaller": (
            batch.mini_batch_size == batch.batch_size
        ),
        "batch.over_sampling, which stops what comes last": batch.over_sampling > 0,
        "batch.replay, which is added to a whole batch": batch.replay is not None,
        f"{barrier}, which learns from whole batches, where nothing is scored before them": (
            barrier is not None and not has_scores
        ),
    }
    for what, is_so in in_the_way.items():
        if is_so:
            raise PlanError(f"batch.stream=true does not go with {what}; leave stream out")


def _check_replay(config: Config, schedule: Schedule) -> None:
    replay = config.batch.replay
    assert replay is not None, "the caller has checked it"
    if not schedule.settles_before_sync:
        raise PlanError(
            "batch.replay goes with pipeline=sync or one_step_off: how many fresh groups a step then needs depends on "
            f"what earlier steps had to teach, and pipeline={config.pipeline} releases groups ahead by a fixed number "
            "per step, which bounds their age; leave it out"
        )
    # With a lag, the batch of step s has tokens of version s - 1, and is in the history when that of s + 2 is drawn.
    if replay.max_age < (least := 1 + 2 * schedule.lag):
        raise PlanError(
            f"batch.replay.max_age={replay.max_age} does nothing with pipeline={config.pipeline}: the next batch is "
            f"made while this one trains, so that what is replayed is {least} versions old; give {least} or more"
        )
    if int(replay.share * config.batch.batch_size) == 0:
        raise PlanError(
            f"batch.replay.share={replay.share:g} of batch.batch_size={config.batch.batch_size} groups is "
            "less than one, so that it does nothing; raise it, or leave batch.replay out"
        )
    _require_off_policy(config, "batch.replay")


def _require_off_policy(config: Config, what: str) -> None:
    algorithm = config.algorithm
    if algorithm.correction != "none" or loss_named(algorithm.loss).is_to_sampler:
        return
    if algorithm.old_logprobs == "recompute":
        needs_pass = reads_old_pass(config) or config.batch.given or not loss_named(algorithm.loss).has_ratio
        raise PlanError(
            f"{what} learns from tokens of older weights, which algorithm.old_logprobs=recompute "
            "would treat as the engine's own; set algorithm.correction=tis (or icepop)"
            + ("" if needs_pass else ", or algorithm.old_logprobs=rollout")
        )
    if not loss_named(algorithm.loss).has_ratio:
        raise PlanError(
            f"{what} learns from tokens of older weights, and algorithm.loss={algorithm.loss} has no ratio that would "
            "tell; set algorithm.correction=tis (or icepop)"
        )


def _check_layout(config: Config) -> None:
    """Check the layout: processes, GPUs, and which roles share them."""
    schedule = create_schedule(config)
    if config.rollout.colocated and not schedule.is_on_policy:
        raise PlanError(
            f"pipeline={config.pipeline} generates and trains at the same time, which rollout.colocated=true rules "
            "out; choose pipeline=sync, or colocated=false"
        )
    replica, num_replicas = config.rollout.parallel, config.rollout.num_replicas
    if config.rollout.colocated and num_replicas * replica.num_ranks != config.engine.world_size:
        raise PlanError(
            f"rollout.colocated=true puts the replicas on all GPUs of the engine, but rollout.num_replicas="
            f"{num_replicas} of tp x pp x dp = {replica.num_ranks} GPUs and engine.world_size="
            f"{config.engine.world_size}; make the product equal to it"
        )
    if config.rollout.elastic is not None:
        _check_elastic(config, config.rollout.elastic, schedule)
    lora = config.engine.lora
    if lora is not None and lora.export == LoraExport.ADAPTER and is_offloaded(config):
        raise PlanError(
            "engine.lora.export=adapter sends the adapter alone, and rollout.colocated=true gives the memory of the "
            "other weights back; leave the export out, or the servers apart"
        )
    sizes = {"engine.world_size": config.engine.world_size, "agent.num_workers": config.agent.num_workers}
    for key, size in (sizes | {"rollout.num_replicas": config.rollout.num_replicas}).items():
        if config.runtime == "inline" and size > 1:
            raise PlanError(f"{key}={size} needs processes of its own: use runtime=ray")
    if config.runtime == "inline" and not schedule.is_on_policy:
        raise PlanError(f"pipeline={config.pipeline} generates and trains at the same time, which takes runtime=ray")


def _check_elastic(config: Config, section: ElasticSection, schedule: Schedule) -> None:
    create_elastic(section)
    num_replicas = config.rollout.num_replicas
    if not section.min_replicas <= num_replicas <= section.max_replicas:
        raise PlanError(
            f"rollout.num_replicas={num_replicas}, with which the run begins, is not within rollout.elastic's "
            f"{section.min_replicas} to {section.max_replicas}; change one of them"
        )
    for is_so, what in (
        (config.runtime == "inline", "runtime=inline, which has one process"),
        (bool(config.rollout.colocated), "rollout.colocated=true, whose replicas have the GPUs of the engine"),
        (schedule.is_on_policy, f"pipeline={config.pipeline}, in which generation and learning take turns"),
    ):
        if is_so:
            raise PlanError(f"rollout.elastic does not go with {what}; leave it out")
    ranks, size = config.rollout.parallel.num_ranks, config.engine.world_size
    lora = config.engine.lora
    for is_so, what in (
        (schedule.settles_before_sync, f"pipeline={config.pipeline}, which waits with all of its memory in use"),
        (config.batch.stream, "batch.stream=true, which learns while it waits"),
        (config.weights.delta, "weights.delta=true: a lent replica misses versions"),
        (
            lora is not None and lora.export == LoraExport.ADAPTER,
            "engine.lora.export=adapter: lent memory is given back",
        ),
        ("://" in (config.weights_transport or ""), "a whole address as weights_transport: it takes two sessions"),
        (size % ranks != 0, f"replicas of {ranks} GPUs, which do not divide engine.world_size={size}"),
    ):
        if section.lend and is_so:
            raise PlanError(f"rollout.elastic.lend does not go with {what}; leave it out")
