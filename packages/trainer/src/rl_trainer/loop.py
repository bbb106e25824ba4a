"""THE training loop: generate, learn, hand the new weights to the servers, repeat.

One loop for every `Schedule` (`pipeline/staleness.py`): what differs is which phases overlap, and how old a token may
be. Knows the order of a step. Does not know where anything runs, how tensors travel, which engine trains or which
server generates.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import estimator_named
from rl_trainer.algorithms.kl_controller import TOKEN_ENTROPY, AdaptiveEntropy, AdaptiveKl
from rl_trainer.errors import StaleWeightsError
from rl_trainer.metrics import PhaseTimer, StepRecord
from rl_trainer.pipeline.rollout_source import Generated, hash_seed
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.plan import has_old_pass
from rl_trainer.workers.columns import TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config, ReplaySection
    from rl_trainer.data import Row
    from rl_trainer.metrics import HeldGroup
    from rl_trainer.pipeline.ema_reference import EmaReference
    from rl_trainer.pipeline.replay_buffer import Replay
    from rl_trainer.pipeline.replicas import AgentReplicas
    from rl_trainer.pipeline.rollout_source import RolloutSource
    from rl_trainer.pipeline.weight_sync import WeightSync
    from rl_trainer.workers.engine import CriticWorker, EngineWorker, UpdateReport
    from rl_trainer.workers.queue import SampleWorker
    from rl_trainer.workers.teacher import ServedTeacherWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The components of one job, which the training loop drives."""

    actor: EngineWorker
    """The policy being trained."""
    reference: EngineWorker | None
    """The frozen start policy: an engine of its own, or the actor, if it trains an adapter; None without a penalty."""
    ema_reference: EmaReference | None = None
    """Has the reference follow the policy; None: it stands still."""
    teacher: EngineWorker | ServedTeacherWorker | None = None
    """A frozen model that the policy is pulled towards."""
    critic: CriticWorker | None = None
    """The value function, or the implicit process reward model; None without one."""
    kl: AdaptiveKl = field(default_factory=lambda: AdaptiveKl(coef=0.0, target=0.0))
    """Weight of the KL in the rewards."""
    entropy: AdaptiveEntropy = field(default_factory=lambda: AdaptiveEntropy(coef=0.0, target=0.0, step=0.005))
    """Weight of the entropy bonus, where it follows a target."""
    source: RolloutSource
    """Generation."""
    weights: WeightSync
    """Actor to servers."""
    queue: TransferQueue
    """The controller's client: references only."""
    agents: AgentReplicas
    """What generation runs on."""
    eval_rows: Sequence[Row]
    """Held-out rows."""
    samples: SampleWorker | None = None
    """Writes what is learned from to disk; None keeps nothing."""
    replay: Replay | None = None
    """Groups that may be learned from again; None: every group is learned from once."""
    held: tuple[HeldGroup, ...] = ()
    """Groups that an earlier process finished and did not learn from; in the queue."""
    num_too_long: int = 0
    """Rows that were left out because their prompts are longer than `data.max_prompt_tokens`."""


def run_loop(
    components: Components, config: Config, eval_rows: Sequence[Row], *, start_step: int = 0
) -> Iterator[StepRecord]:
    """`steps_of`, without the collector of cyclic garbage walking all that was there before.

    A step makes references by the ten thousand, and torch alone leaves half a million objects: walking them again and
    again took more than half of the controller's time at 1,024 ranks.
    """
    gc.freeze()  # and no collection before: that alone takes half a second
    try:
        yield from steps_of(components, config, eval_rows, start_step=start_step)
    finally:
        gc.unfreeze()


def steps_of(
    components: Components, config: Config, eval_rows: Sequence[Row], *, start_step: int = 0
) -> Iterator[StepRecord]:
    """Train, yielding a record after every step. Step 0's record is the evaluation of the start policy.

    The servers hold weight version `step + 1` when step `step` has been yielded. The record's `pending` are the prompts
    that are being generated then, its `held` the groups that wait to be learned from: a resumed run begins with both.
    """
    schedule, source, replay = create_schedule(config), components.source, components.replay
    timer, first = PhaseTimer(), start_step + 1
    yield begin(components, eval_rows, start_step, timer)

    source.resume(components.held)
    lag = schedule.lag if components.held else 0  # a first batch that nobody generated ahead is of these weights
    for step in range(first, config.steps + 1):
        parts: list[Generated] = []
        updates, ages = list[dict[str, float]](), dict[str, float]()
        for size in sizes_of(config):
            with timer.phase("generate" if schedule.is_on_policy else "wait_generate"):
                if not parts:
                    source.release(step)
                parts.append(source.take(step, size))
            ages = ages_of(parts[-1], version=step, bound=schedule.bound(lag), least=lag, replay=config.batch.replay)
            if schedule.releases_before_update:
                source.release(step)
            if size is None:
                with timer.phase("yield_memory"):
                    components.weights.yield_memory()
            updates += learn(components, config, parts[-1].batch, step, timer)
        generated = Generated.joined(parts)
        if len(parts) > 1:
            ages = ages_of(generated, version=step, bound=schedule.bound(lag), least=lag)
        if components.ema_reference is not None:
            with timer.phase("update_reference"):
                components.ema_reference.follow(step)
        if schedule.settles_before_sync and not schedule.is_on_policy:
            with timer.phase("wait_generate"):
                source.settle()
        with timer.phase("weight_sync"):
            components.weights.sync(step + 1)
        if replay is not None:
            replay.keep(generated.batch, generated.groups, step + 1)
        for part in parts:
            source.finish(part, step)
        if schedule.releases_after_sync:
            source.release(step + 1)
        accuracy = evaluate(components, eval_rows, timer) if is_eval_due(config, step) else None
        yield record_of(step, generated, source, ages, updates, accuracy, timer.take())
        lag = schedule.lag


def sizes_of(config: Config) -> list[int | None]:
    """Groups of each part that a step takes and learns from: all, or with `batch.stream` mini-batches as they come."""
    batch = config.batch
    return [batch.mini_batch_size] * (batch.batch_size // batch.mini_batch_size) if batch.stream else [None]


def begin(components: Components, eval_rows: Sequence[Row], start_step: int, timer: PhaseTimer) -> StepRecord:
    """Give the servers the first weights, of version `start_step + 1`, and measure the policy before it learns."""
    with timer.phase("weight_sync"):
        components.weights.sync(start_step + 1)
    accuracy = evaluate(components, eval_rows, timer)
    return StepRecord.of_evaluation(start_step, accuracy, timer.take(), position=components.source.position)


def evaluate(components: Components, eval_rows: Sequence[Row], timer: PhaseTimer) -> float:
    """Mean reward on held-out rows."""
    with timer.phase("eval"):
        return components.source.evaluate(eval_rows)


def learn(
    components: Components, config: Config, batch: BatchMeta, step: int, timer: PhaseTimer
) -> list[dict[str, float]]:
    """Score a batch, compute its advantages, and take the optimizer steps of one training step on it.

    Between two calls the source takes in what has been generated meanwhile.

    Returns:
        By optimizer step, its metrics; `loss`, `grad_norm` and `lr` are the policy's, and there if it learned.
    """
    actor, source = components.actor, components.source
    for name, score in scores_of(components, config):
        with timer.phase(name):
            batch = batch.union(score(batch))
        source.collect()
    kl_coef = components.kl.coef
    with timer.phase("advantage"):
        is_whole = estimator_named(config.algorithm.advantage).scope == "whole"
        compute = actor.compute_whole_advantage if is_whole else actor.compute_advantage
        report = compute(batch, kl_coef, hash_seed(f"{config.seed}/{step}"))
        batch = batch.union(report.batch)
    if components.samples is not None:
        with timer.phase("keep_samples"):
            components.samples.write(batch, step)
    if report.reward_kl is not None:
        components.kl.update(report.reward_kl)
    updates: list[dict[str, float]] = []
    for mini_batch in mini_batches(batch, config, step):
        metrics: dict[str, float] = {}
        if components.critic is not None:
            with timer.phase("update_critic"):
                critic = components.critic.update_critic(mini_batch)
            metrics |= {name: value for name, value in critic.metrics.items() if name != "loss"}  # it has its own name
            metrics |= {"critic_grad_norm": critic.grad_norm}
        if config.critic is None or step > config.critic.warmup_steps:
            with timer.phase("update"):
                policy = update_actor(components, mini_batch)
            metrics |= policy.metrics | {"grad_norm": policy.grad_norm, "lr": policy.lr}
        updates.append(metrics)
        source.collect()
    if report.reward_kl is not None:
        updates[-1].update(reward_kl=report.reward_kl, kl_coef=kl_coef)
    return updates


def update_actor(components: Components, mini_batch: BatchMeta) -> UpdateReport:
    """One optimizer step of the policy; a coefficient of the entropy bonus that follows a target takes it into account.

    `entropy_coef` among its metrics is the one of this step.
    """
    entropy = components.entropy
    if entropy.target == 0:
        return components.actor.update_actor(mini_batch)
    weight = entropy.weight
    report = components.actor.update_actor(mini_batch, entropy_coef=weight)
    entropy.update(report.metrics[TOKEN_ENTROPY])
    return replace(report, metrics={**report.metrics, "entropy_coef": weight})


def scores_of(components: Components, config: Config) -> Iterator[tuple[str, Callable[[BatchMeta], BatchMeta]]]:
    """(phase, call) of every stage that writes a column of the batch before its advantages, in the order of reading."""
    actor, reference, teacher = components.actor, components.reference, components.teacher
    if has_old_pass(config):
        yield "old_logprobs", actor.compute_log_prob
    if reference is not None:
        yield "ref_logprobs", partial(reference.compute_log_prob, column="ref_logprobs")
    if teacher is not None:
        yield "teacher_logprobs", teacher.compute_teacher_log_prob
    if components.critic is not None:
        yield "values", components.critic.compute_values
    for name in config.algorithm.stages:
        yield name.rpartition(":")[2], partial(actor.compute_stage, name=name)


def mini_batches(batch: BatchMeta, config: Config, step: int) -> list[BatchMeta]:
    """The batch in mini-batches of whole groups, in a seeded random order of groups."""
    groups: dict[int, list[int]] = {}
    for index, tags in enumerate(batch.tags):
        groups.setdefault(tags["group_id"], []).append(index)
    order = sorted(groups)
    random.Random(f"{config.seed}/{step}").shuffle(order)
    size = config.batch.mini_batch_size
    return [batch.reorder([i for g in order[at : at + size] for i in groups[g]]) for at in range(0, len(order), size)]


def ages_of(
    generated: Generated, *, version: int, bound: int | None, least: int = 0, replay: ReplaySection | None = None
) -> dict[str, float]:
    """Share of samples per age of their oldest token in weight versions; the mean age, and the highest.

    Args:
        generated: What weights of `version` learn from.
        version: Of the weights that learn.
        bound: The highest age that the pipeline allows; None: any.
        least: The lowest.
        replay: Bounds the age of groups that are learned from again, which are older than the fresh ones may be.

    Raises:
        StaleWeightsError: a token is older than `bound`, or newer than `least`.
    """
    ages: Counter[int] = Counter()
    batch, reused = generated.batch, {group.group_id for group in generated.reused}
    for sample_id, tags in zip(batch.sample_ids, batch.tags, strict=True):
        low, high = tags["weight_version_min"], tags["weight_version_max"]
        limit = replay.max_age if replay is not None and tags["group_id"] in reused else bound
        if not low <= high <= version - least or (limit is not None and version - low > limit):
            raise StaleWeightsError(
                f"sample {sample_id} has tokens of weight versions {low} to {high}; weights of version {version} may "
                f"learn from {'any up' if limit is None else version - limit} to {version - least}"
            )
        ages[version - low] += 1
    shares = {f"staleness_{age}": ages[age] / len(batch) for age in range(max(ages, default=0) + 1)}
    mean = sum(age * count for age, count in ages.items()) / len(batch)
    return {**shares, "staleness_mean": mean, "staleness_max": float(max(ages, default=0))}


def is_eval_due(config: Config, step: int) -> bool:
    """Whether held-out rows are evaluated after `step`: every `eval_every` steps, and after the last."""
    return step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)


def record_of(
    step: int,
    generated: Generated,
    source: RolloutSource,
    ages: Mapping[str, float],
    updates: Sequence[Mapping[str, float]],
    accuracy: float | None,
    phase_s: dict[str, float],
) -> StepRecord:
    """What the step's reports say together."""
    reused = {group.group_id for group in generated.reused}
    tags = [tags for tags in generated.batch.tags if tags["group_id"] not in reused]
    names = {name: None for update in updates for name in update}  # in order
    metrics: dict[str, float] = {name: fmean(u[name] for u in updates if name in u) for name in names}
    metrics |= {name: value for name, value in updates[-1].items() if name == "lr"}
    metrics |= {"dropped_groups": generated.dropped_groups, "late_groups": generated.late_groups}
    metrics |= {"stopped_groups": generated.stopped_groups, "replayed_groups": len(reused)}
    metrics |= {**ages, **part_means(tags), **completion_metrics(tags)}
    return StepRecord(
        step=step,
        position=source.position,
        pending=source.pending,
        held=source.held,
        reward=generated.reward,
        accuracy=accuracy,
        num_tokens=sum(t["num_tokens"] for t in tags),
        num_truncated=sum(t["finish_reason"] in TRUNCATED for t in tags),
        failures=generated.failures,
        metrics=metrics,
        phase_s=phase_s,
        rows=tuple(group.row_index for group in generated.groups),
    )


def completion_metrics(tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How long completions were and how rewards spread: by sample, and by group where all rewards are equal."""
    if not tags:
        return {}
    rewards, lengths = [tag["reward"] for tag in tags], [tag["num_tokens"] for tag in tags]
    distinct = Counter(group for group, _ in {(tag["group_id"], tag["reward"]) for tag in tags})
    mean = fmean(rewards)
    return {
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_share": sum(tag["finish_reason"] in TRUNCATED for tag in tags) / len(tags),
        "reward_std": fmean([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
        "groups_without_signal": sum(count == 1 for count in distinct.values()) / len(distinct),
    }


def part_means(tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`reward/NAME`: the mean of each part of the rewards, not weighted, where rewards have components."""
    sums: dict[str, float] = {}
    for tag in tags:
        for name, value in tag.get("parts", {}).items():
            sums[name] = sums.get(name, 0.0) + value
    return {f"reward/{name}": total / len(tags) for name, total in sums.items()}
