"""Rules of `pipeline`, `policies`, `staleness`, `batch.stream`, `batch.replay` and `rollout.elastic`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_engine.types import LoraExport
from rl_trainer.algorithms import estimator_named, loss_named
from rl_trainer.config.schema import StalenessSection
from rl_trainer.errors import PlanError
from rl_trainer.pipeline.elastic import create_policy as create_elastic
from rl_trainer.pipeline.roles import has_old_pass, has_reference, policies_of, reads_old_pass, update_barrier
from rl_trainer.pipeline.staleness import create_schedule

if TYPE_CHECKING:
    from rl_trainer.config import Config
    from rl_trainer.config.schema import ElasticSection
    from rl_trainer.pipeline.staleness import Schedule


def check_pipeline(config: Config) -> None:
    """Check the schedule, and what learning from older weights or another distribution needs.

    Raises:
        PlanError: settings that cannot work together.
    """
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
    if config.batch.over_sampling:
        _require_off_policy(config, "batch.over_sampling")
    if schedule.lag or schedule.policy.max_staleness:
        _require_off_policy(config, f"pipeline={config.pipeline}")


_SAMPLING = ("temperature", "top_p", "max_new_tokens", "eval_temperature", "eval_samples")
"""Keys of `rollout` that every request of a rollout has, whichever policy answers it."""


def check_policies(config: Config) -> None:
    """Check what several policies have in common, and that the run asks for nothing that one alone can have.

    Raises:
        PlanError: settings that cannot work together.
    """
    if not config.policies:
        return
    of_one = {
        "batch.stream": config.batch.stream,
        "batch.replay": config.batch.replay is not None,
        "batch.given": config.batch.given > 0,
        "teacher": config.teacher is not None,
        f"weights_transport={config.weights_transport}": "://" in (config.weights_transport or ""),
    }
    if key := next((key for key, is_set in of_one.items() if is_set), None):
        raise PlanError(f"{key} is for runs of one policy, and policies has {len(config.policies)}; leave it out")
    for name, own in policies_of(config).items():
        same = {f"rollout.{key}": (getattr(own.rollout, key), getattr(config.rollout, key)) for key in _SAMPLING}
        same["rollout.colocated"] = own.rollout.colocated, config.rollout.colocated
        same["engine.router_replay"] = own.engine.router_replay, config.engine.router_replay
        same["model.warmup"] = own.model.warmup, config.model.warmup
        for key, (value, first) in same.items():
            if value != first:
                raise PlanError(
                    f"policies.{name}.{key}={value} differs from {first} of the first policy, and all have to have the "
                    f"same; set {key} of the run"
                )
        if (own.model.path is None) != (config.model.path is None):
            raise PlanError(f"policies.{name}.model.path={own.model.path}: give each policy a path, or none of them")
        if own.rollout.elastic is not None:
            raise PlanError(f"policies.{name}.rollout.elastic is for runs of one policy; leave it out")
        if "greedy_rewards" in estimator_named(own.algorithm.advantage).reads:
            raise PlanError(
                f"policies.{name}.algorithm.advantage={own.algorithm.advantage} compares with a greedy completion, "
                "which the policies of a run have in common; choose another, such as grpo"
            )


def _check_stream(config: Config, schedule: Schedule) -> None:
    """Check that streamed mini-batches have the gradients of a whole batch, and that streaming does something."""
    batch, barrier = config.batch, update_barrier(config)
    has_scores = has_old_pass(config) or has_reference(config) or bool(config.algorithm.stages)
    has_scores = has_scores or config.critic is not None or (config.teacher is not None and config.teacher.url is None)
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
            f"{what} learns from tokens of older weights, and algorithm.loss={algorithm.loss} has no ratio to "
            "correct for it; set algorithm.correction=tis (or icepop)"
        )


def check_elastic(config: Config, section: ElasticSection, schedule: Schedule) -> None:
    """Check what `rollout.elastic` needs of the schedule and the layout.

    Raises:
        PlanError: it has not.
    """
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
        (lora is not None and lora.export == LoraExport.ADAPTER, "engine.lora.export=adapter: lent memory is returned"),
        ("://" in (config.weights_transport or ""), "a whole address as weights_transport: it takes two sessions"),
        (size % ranks != 0, f"replicas of {ranks} GPUs, which do not divide engine.world_size={size}"),
    ):
        if section.lend and is_so:
            raise PlanError(f"rollout.elastic.lend does not go with {what}; leave it out")
