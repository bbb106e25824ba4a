"""The training loop: generate, learn, sync weights, repeat.

`steps_of` is the loop, `learn` is what it does with a batch. One loop serves every `Schedule`
(`pipeline/staleness.py`), which says what may overlap and how old a token may be. The loop knows the order of a step.
It does not know where anything runs, how tensors travel, which engine trains or which server generates.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import estimator_named
from rl_trainer.algorithms.kl_controller import TOKEN_ENTROPY, AdaptiveEntropy, AdaptiveKl
from rl_trainer.errors import StaleWeightsError
from rl_trainer.metrics import PhaseTimer, StepRecord, receipt_of
from rl_trainer.pipeline.rollout_source import Generated, StopRequestedError, hash_seed
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.plan import has_old_pass, update_barrier
from rl_trainer.workers.columns import GIVEN, TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config, ReplaySection
    from rl_trainer.data import Row
    from rl_trainer.metrics import Evaluation, HeldGroup
    from rl_trainer.pipeline.ema_reference import EmaReference
    from rl_trainer.pipeline.replay_buffer import Replay
    from rl_trainer.pipeline.replicas import AgentReplicas, SomeSamples
    from rl_trainer.pipeline.rollout_source import RolloutSource
    from rl_trainer.pipeline.weight_sync import WeightSync
    from rl_trainer.workers.engine import CriticWorker, EngineWorker, UpdateReport
    from rl_trainer.workers.queue import SampleWorker
    from rl_trainer.workers.teacher import ServedTeacherWorker, Teachers


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Components of a training run: the worker groups and clients that the loop calls. `setup.place` makes them."""

    actor: EngineWorker
    """The policy being trained."""
    reference: EngineWorker | None
    """The reference: an engine with the start policy, or the actor itself if it trains an adapter; None without KL."""
    ema_reference: EmaReference | None = None
    """Moves the reference's weights after the policy's; None: they stay those of the start policy."""
    teacher: EngineWorker | ServedTeacherWorker | Teachers | None = None
    """The teacher of distillation, or several; the actor, where the policy is its own; None without one."""
    critic: CriticWorker | None = None
    """The critic: a value function, or PRIME's process reward model; None without one."""
    kl: AdaptiveKl = field(default_factory=lambda: AdaptiveKl(coef=0.0, target=0.0))
    """The coefficient of the KL penalty in the rewards."""
    entropy: AdaptiveEntropy = field(default_factory=lambda: AdaptiveEntropy(coef=0.0, target=0.0, step=0.005))
    """The coefficient of the entropy bonus, where it follows a target."""
    source: RolloutSource
    """The rollout source: prompts out, complete groups in."""
    weights: WeightSync
    """The weight sync from the actor to the servers."""
    queue: TransferQueue
    """The controller's client of the queue: ids and tags, no tensors."""
    agents: AgentReplicas
    """The agent workers."""
    eval_rows: Sequence[Row]
    """Held-out rows."""
    samples: SampleWorker | SomeSamples | None = None
    """Writes samples to disk; None: none are kept."""
    replay: Replay | None = None
    """The replay buffer; None: every group is learned from once."""
    held: tuple[HeldGroup, ...] = ()
    """Resumed groups: in the queue, finished by an earlier process that did not learn from them."""
    num_too_long: int = 0
    """Rows that were left out because their prompts are longer than `data.max_prompt_tokens`."""
    num_bad: int = 0
    """Rows that were left out because they cannot be asked (`data.on_bad_row=drop`)."""
    pools: Mapping[str, str] = field(default_factory=dict[str, str])
    """By scoring stage, the pool that computes it, of those that have one of their own; the others have the actor's."""


def run_loop(
    components: Components,
    config: Config,
    eval_rows: Sequence[Row],
    *,
    start_step: int = 0,
    timer: PhaseTimer | None = None,
    first_rows: Sequence[Row] | None = None,
) -> Iterator[StepRecord]:
    """Run `steps_of` with all objects of before frozen, so that the garbage collector does not walk them.

    A step makes references by the ten thousand, and torch alone leaves half a million objects: walking them again and
    again took more than half of the controller's time at 1,024 ranks.
    """
    gc.freeze()  # and no collection before: that alone takes half a second
    try:
        yield from steps_of(components, config, eval_rows, start_step=start_step, timer=timer, first_rows=first_rows)
    finally:
        gc.unfreeze()


def steps_of(
    components: Components,
    config: Config,
    eval_rows: Sequence[Row],
    *,
    start_step: int = 0,
    timer: PhaseTimer | None = None,
    first_rows: Sequence[Row] | None = None,
) -> Iterator[StepRecord]:
    """Train: the loop itself. Yields a record per step; step 0's is the evaluation of the start policy.

    The servers hold weight version `step + 1` when step `step` has been yielded. The record's `pending` are the prompts
    that are being generated then, its `held` the groups that wait to be learned from: a resumed run begins with both.

    Args:
        components: Components that the loop calls.
        config: Configuration of the run.
        eval_rows: Held-out rows.
        start_step: The last step of an earlier process; 0 begins at the start.
        timer: Attributes time to phases; by it another thread knows which one is under way.
        first_rows: Held-out rows of the evaluation before the first step; None: all.

    Raises:
        StaleWeightsError: a token is older than the schedule allows.
        RolloutFailedError: a batch cannot be filled.
    """
    schedule, source, replay = create_schedule(config), components.source, components.replay
    timer, first = timer or PhaseTimer(), start_step + 1
    learns_late = config.batch.stream and update_barrier(config) is not None
    yield begin(components, eval_rows if first_rows is None else first_rows, start_step, timer)

    source.resume(components.held)
    lag = schedule.lag if components.held else 0  # the first batch was not generated ahead: it is of these weights
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
            if learns_late:
                parts[-1] = replace(parts[-1], batch=score(components, config, parts[-1].batch, timer))
            else:
                updates += learn(components, config, score(components, config, parts[-1].batch, timer), step, timer)
        generated = Generated.joined(parts)
        if learns_late:
            updates = learn(components, config, by_release(generated.batch), step, timer)
        if len(parts) > 1:
            ages = ages_of(generated, version=step, bound=schedule.bound(lag), least=lag)
        if components.ema_reference is not None:
            with timer.phase("update_reference"):
                components.ema_reference.follow(step)
        if schedule.settles_before_sync and not schedule.is_on_policy:
            with timer.phase("wait_generate"):
                source.settle()
        with timer.phase("weight_sync"):
            receipt = receipt_of(components.weights.sync(step + 1))
        if replay is not None:
            replay.keep(generated.batch, generated.groups, step + 1)
        for part in parts:
            source.finish(part, step)
        if schedule.releases_after_sync:
            source.release(step + 1)
        held_out = None
        if is_eval_due(config, step):
            with suppress(StopRequestedError):
                held_out = evaluate(components, eval_rows, timer)
        record = record_of(step, generated, source, ages, updates, held_out, timer.take())
        yield replace(record, weights=receipt)
        lag = schedule.lag


def sizes_of(config: Config) -> list[int | None]:
    """Groups per part of a step's batch: one whole part (None), or with `batch.stream` one part per mini-batch."""
    batch = config.batch
    return [batch.mini_batch_size] * (batch.batch_size // batch.mini_batch_size) if batch.stream else [None]


def begin(components: Components, eval_rows: Sequence[Row], start_step: int, timer: PhaseTimer) -> StepRecord:
    """Sync the first weights, as version `start_step + 1`, and evaluate the policy before it learns."""
    with timer.phase("weight_sync"):
        components.weights.sync(start_step + 1)
    held_out = evaluate(components, eval_rows, timer)
    return StepRecord.of_evaluation(start_step, held_out, timer.take(), position=components.source.position)


def evaluate(components: Components, eval_rows: Sequence[Row], timer: PhaseTimer) -> Evaluation:
    """Evaluate on held-out rows."""
    with timer.phase("eval"):
        return components.source.evaluate(eval_rows)


def score(components: Components, config: Config, batch: BatchMeta, timer: PhaseTimer) -> BatchMeta:
    """Add the columns that the scoring stages write. Stages of one pool take turns, those of different ones do not.

    A plug-in's stages (`algorithm.stages`) come last and see all other columns. A phase is the time that its stage is
    waited for.
    """
    stages, given = [*scores_of(components, config)], batch
    lanes = {name: components.pools.get(name, "") for name, _ in stages}
    with ExitStack() as stack:
        threads = {pool: stack.enter_context(ThreadPoolExecutor(1, "score")) for pool in {*lanes.values()} - {""}}
        begun = {name: threads[lanes[name]].submit(call, given) for name, call in stages if lanes[name]}
        for name, call in stages:
            if name not in begun:
                with timer.phase(name):
                    batch = batch.union(call(batch))
                components.source.collect()
        for name, stage in begun.items():
            with timer.phase(name):
                batch = batch.union(stage.result())
            components.source.collect()
    for name in config.algorithm.stages:
        with timer.phase(name.rpartition(":")[2]):
            batch = batch.union(components.actor.compute_stage(batch, name=name))
        components.source.collect()
    return batch


def update_actor(components: Components, mini_batch: BatchMeta) -> UpdateReport:
    """Take one optimizer step of the policy, and move the entropy coefficient if it follows a target.

    `entropy_coef` among its metrics is the one of this step.
    """
    entropy = components.entropy
    if entropy.target == 0:
        return components.actor.update_actor(mini_batch)
    weight = entropy.weight
    report = components.actor.update_actor(mini_batch, entropy_coef=weight)
    entropy.update(report.metrics[TOKEN_ENTROPY])
    return replace(report, metrics={**report.metrics, "entropy_coef": weight})


def by_release(batch: BatchMeta) -> BatchMeta:
    """Order the groups of a joined batch as those of a batch that was taken whole."""
    return batch.reorder(sorted(range(len(batch)), key=lambda row: batch.tags[row]["group_id"]))


def learn(
    components: Components, config: Config, batch: BatchMeta, step: int, timer: PhaseTimer
) -> list[dict[str, float]]:
    """Learn from a scored batch: advantages, then one optimizer step per mini-batch, while samples are written.

    Returns:
        Metrics per optimizer step. `policy_loss`, `grad_norm` and `lr` are absent where the critic alone learned.
    """
    actor, kl_coef = components.actor, components.kl.coef
    with timer.phase("advantage"):
        is_whole = estimator_named(config.algorithm.advantage).scope == "whole"
        compute = actor.compute_whole_advantage if is_whole else actor.compute_advantage
        report = compute(batch, kl_coef, hash_seed(f"{config.seed}/{step}"))
        batch = batch.union(report.batch)
    if report.reward_kl is not None:
        components.kl.update(report.reward_kl)
    with ThreadPoolExecutor(1, "samples") as beside:
        kept = None if components.samples is None else beside.submit(components.samples.write, batch, step)
        updates = update_by_mini_batches(components, config, batch, step, timer)
        if kept is not None:
            with timer.phase("keep_samples"):  # what is left of it: an agent that generates is slow to write
                kept.result()
    if report.reward_kl is not None:
        updates[-1].update(reward_kl=report.reward_kl, kl_coef=kl_coef)
    return updates


def update_by_mini_batches(
    components: Components, config: Config, batch: BatchMeta, step: int, timer: PhaseTimer
) -> list[dict[str, float]]:
    """Take one optimizer step of the policy, and of the critic, per mini-batch; returns the metrics of each."""
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
        components.source.collect()
    return updates


def scores_of(components: Components, config: Config) -> Iterator[tuple[str, Callable[[BatchMeta], BatchMeta]]]:
    """Scoring stages, in order: (phase, call). Each call writes a column, and reads none that another one writes."""
    actor, reference, teacher = components.actor, components.reference, components.teacher
    if has_old_pass(config):
        yield "old_logprobs", actor.compute_log_prob
    if reference is not None:
        yield "ref_logprobs", partial(reference.compute_log_prob, column="ref_logprobs")
    if teacher is not None:
        yield "teacher_logprobs", teacher.compute_teacher_log_prob
    if components.critic is not None:
        yield "values", components.critic.compute_values


def mini_batches(batch: BatchMeta, config: Config, step: int) -> list[BatchMeta]:
    """Mini-batches of `batch.mini_batch_size` whole groups, in a random order that seed and step determine."""
    groups: dict[Any, Sequence[int]] = batch.positions("group_id")
    order = sorted(groups)
    random.Random(f"{config.seed}/{step}").shuffle(order)
    size = config.batch.mini_batch_size
    chosen = [order[at : at + size] for at in range(0, len(order), size)]
    return [batch.reorder([*chain.from_iterable([groups[g] for g in part])]) for part in chosen]


def ages_of(
    generated: Generated, *, version: int, bound: int | None, least: int = 0, replay: ReplaySection | None = None
) -> dict[str, float]:
    """Staleness metrics of a batch, after the check that no token is older than allowed.

    An age is that of a sample's oldest token, in weight versions: `staleness_N` is the share of samples of age N,
    beside `staleness_mean` and `staleness_max`.

    Args:
        generated: The batch.
        version: Version of the weights that learn from it.
        bound: The highest age that the schedule allows; None: any.
        least: The lowest age that the schedule allows.
        replay: The highest age of replayed groups, which may be older than fresh ones.

    Raises:
        StaleWeightsError: a token is older than `bound`, or newer than `least`.
    """
    ages: Counter[int] = Counter()
    batch, reused = generated.batch, {group.group_id for group in generated.reused}
    spans = [
        (tags["weight_version_min"], tags["weight_version_max"], tags["group_id"] in reused) for tags in batch.tags
    ]
    for (low, high, is_reused), count in Counter(spans).items():
        limit = replay.max_age if replay is not None and is_reused else bound
        if not low <= high <= version - least or (limit is not None and version - low > limit):
            sample_id = batch.sample_ids[spans.index((low, high, is_reused))]
            raise StaleWeightsError(
                f"sample {sample_id} has tokens of weight versions {low} to {high}; weights of version {version} may "
                f"learn from {'any up' if limit is None else version - limit} to {version - least}"
            )
        ages[version - low] += count
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
    held_out: Evaluation | None,
    phase_s: dict[str, float],
) -> StepRecord:
    """The step's record: metrics averaged over its optimizer steps, staleness, lengths, rewards and times."""
    reused = {group.group_id for group in generated.reused}
    tags = [tags for tags in generated.batch.tags if tags["group_id"] not in reused and not tags.get(GIVEN)]
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
        accuracy=None if held_out is None else held_out.accuracy,
        eval_reward=None if held_out is None else held_out.reward,
        eval_prompts=None if held_out is None else held_out.num_prompts,
        num_tokens=sum([tag["num_tokens"] for tag in tags]),
        num_truncated=num_truncated(tags),
        failures=generated.failures,
        last_failure=generated.last_failure,
        metrics=metrics,
        phase_s=phase_s,
        rows=tuple(group.row_index for group in generated.groups),
    )


def num_truncated(tags: Sequence[Mapping[str, Any]]) -> int:
    """Number of completions that were cut off by their length or the deadline of the rollout."""
    return len([None for tag in tags if tag["finish_reason"] in TRUNCATED])


def completion_metrics(tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of completions: lengths in tokens, truncated share, spread of rewards, groups with equal rewards.

    With `unknown_tokens`, ids that the tokenizer has not, where any was sampled.
    """
    if not tags:
        return {}
    rewards, lengths = [tag["reward"] for tag in tags], [tag["num_tokens"] for tag in tags]
    groups = [tag["group_id"] for tag in tags]
    first = dict(zip(groups, rewards, strict=True))  # one reward per group
    has_signal = {group for group, reward in zip(groups, rewards, strict=True) if reward != first[group]}
    mean = fmean(rewards)
    return {
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_share": num_truncated(tags) / len(tags),
        "reward_std": fmean([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
        "groups_without_signal": 1 - len(has_signal) / len(first),
        **({"unknown_tokens": float(unknown)} if (unknown := sum(tag.get("num_unknown", 0) for tag in tags)) else {}),
    }


def part_means(tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of reward components, unweighted, as `reward/NAME`; empty where rewards have none."""
    names = dict.fromkeys(name for tag in tags for name in tag.get("parts", {}))  # a sample lacks what does not apply
    return {f"reward/{name}": fmean(t["parts"][name] for t in tags if name in t["parts"]) for name in names}
