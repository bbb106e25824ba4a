"""The training loop: generate, learn, sync weights, repeat.

`steps_of` is the loop, `learn` is what it does with a batch. One loop serves every `Schedule`
(`pipeline/staleness.py`), which says what may overlap and how old a token may be. The loop knows the order of a step.
It does not know where anything runs, how tensors travel, which engine trains or which server generates.
"""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import estimator_named
from rl_trainer.algorithms.kl_controller import TOKEN_ENTROPY
from rl_trainer.metrics import PhaseTimer, StepRecord, receipt_of
from rl_trainer.pipeline.roles import has_old_pass, policies_of, update_barrier
from rl_trainer.pipeline.rollout_source import Generated, StopRequestedError, hash_seed, take_parts
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.pipeline.step_record import ages_of, record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config
    from rl_trainer.data import Row
    from rl_trainer.metrics import Evaluation
    from rl_trainer.pipeline.components import Components
    from rl_trainer.pipeline.staleness import Schedule
    from rl_trainer.workers.engine_worker import UpdateReport


def run_loop(
    components: Components,
    config: Config,
    eval_rows: Sequence[Row],
    *,
    start_step: int = 0,
    timer: PhaseTimer | None = None,
    first_rows: Sequence[Row] | None = None,
) -> Iterator[StepRecord]:
    """Run `steps_of` with all existing objects frozen, so that the garbage collector does not walk them.

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
    source, timer = components.source, timer or PhaseTimer()
    policies = policies_of(config)
    teams = {name: (own, policies[name]) for name, own in components.by_policy.items()}
    schedule = create_schedule(config).starting(start_step + 1, is_ahead=bool(components.held))
    yield begin(components, eval_rows if first_rows is None else first_rows, start_step, timer)
    source.resume(components.held)
    for step in range(start_step + 1, config.steps + 1):
        parts: list[Generated] = []
        scored: dict[str, list[BatchMeta]] = {name: [] for name in teams}
        updates: dict[str, list[dict[str, float]]] = {name: [] for name in teams}
        # 1. Generate and 2. claim: the whole batch, or with `batch.stream` each mini-batch as it is complete.
        for part in take_parts(source, schedule, config, step, timer):
            # 3. Check that no token is too old.
            ages_of(part, version=step, bound=schedule.bound_at(step), replay=config.batch.replay)
            with timer.phase("yield_memory"):
                for own, _ in teams.values():
                    own.weights.yield_memory()
            parts.append(part)
            for name, (own, settings) in teams.items():  # one, unless the run has several policies
                rows = part.of_policy(name)
                if len(rows) < settings.engine.world_size:  # no rank may be without one
                    updates[name].append({"skipped_samples": float(len(rows))})
                    continue
                # 4. Score.
                scored[name].append(score(own, settings, rows, timer))
                # 5. Advantages and 6. update, unless the mini-batches wait for each other.
                if (batch := learnable(scored[name], settings, is_last=part.is_last)) is not None:
                    updates[name] += learn(own, settings, batch, step, timer)
        # 7. Sync weights.
        receipt = sync_weights(components, schedule, step, timer)
        # 8. Finish: keep groups for replay, free the others' rows, and release prompts with the new weights.
        generated = Generated.joined(parts)
        if components.replay is not None:
            components.replay.keep(generated.batch, generated.groups, step + 1)
        for part in parts:
            source.finish(part, step)
        if schedule.releases_after_sync:
            source.release(step + 1)
        held_out = evaluate_if_due(components, config, eval_rows, step, timer)
        ages = ages_of(generated, version=step, bound=schedule.bound_at(step), replay=config.batch.replay)
        yield replace(record_of(step, generated, source, ages, updates, held_out, timer.take()), weights=receipt)


def learnable(scored: list[BatchMeta], config: Config, *, is_last: bool) -> BatchMeta | None:
    """Rows to learn from now: those scored last, or where mini-batches wait for each other, all once the last is there.

    Groups of a joined batch are in the order of one that was taken whole.
    """
    if not config.batch.stream or update_barrier(config) is None:
        return scored[-1]
    if not is_last:
        return None
    batch = type(scored[0]).concat(scored)
    return batch.reorder(sorted(range(len(batch)), key=lambda row: batch.tags[row]["group_id"]))


def sync_weights(components: Components, schedule: Schedule, step: int, timer: PhaseTimer) -> dict[str, Any]:
    """Sync the weights that step `step` made, as version `step + 1`, after the reference that follows them.

    A policy that had nothing to learn from is sent again: version `step + 1` is served by the replicas of all.
    """
    policies = components.by_policy
    for own in policies.values():
        if own.ema_reference is not None:
            with timer.phase("update_reference"):
                own.ema_reference.follow(step)
    if schedule.settles_before_sync and not schedule.is_on_policy:
        with timer.phase("wait_generate"):
            components.source.settle()
    with timer.phase("weight_sync"):
        receipts = {name: receipt_of(own.weights.sync(step + 1)) for name, own in policies.items()}
    return receipts.get("", receipts)


def begin(components: Components, eval_rows: Sequence[Row], start_step: int, timer: PhaseTimer) -> StepRecord:
    """Sync the first weights, as version `start_step + 1`, and evaluate the policy before it learns."""
    with timer.phase("weight_sync"):
        for own in components.by_policy.values():
            own.weights.sync(start_step + 1)
    held_out = evaluate(components, eval_rows, timer)
    return StepRecord.of_evaluation(start_step, held_out, timer.take(), position=components.source.position)


def evaluate(components: Components, eval_rows: Sequence[Row], timer: PhaseTimer) -> Evaluation:
    """Evaluate on held-out rows."""
    with timer.phase("eval"):
        return components.source.evaluate(eval_rows)


def evaluate_if_due(
    components: Components, config: Config, eval_rows: Sequence[Row], step: int, timer: PhaseTimer
) -> Evaluation | None:
    """Evaluate every `eval_every` steps and after the last; None at other steps, and where the run is to stop."""
    if step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0):
        with suppress(StopRequestedError):
            return evaluate(components, eval_rows, timer)
    return None


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


def learn(
    components: Components, config: Config, batch: BatchMeta, step: int, timer: PhaseTimer
) -> list[dict[str, float]]:
    """Learn from a scored batch: advantages, then one optimizer step per mini-batch, while samples are written.

    Returns:
        Metrics per optimizer step. `policy_loss`, `grad_norm` and `lr` are absent where the critic alone learned.
    """
    actor, kl_coef = components.actor, components.kl.coef
    with timer.phase("advantage"):
        has_groups = len(batch.positions("group_id")) >= config.engine.world_size  # one for every rank
        is_whole = estimator_named(config.algorithm.advantage).scope == "whole" or not has_groups
        compute = actor.compute_whole_advantage if is_whole else actor.compute_advantage
        report = compute(batch, kl_coef, hash_seed(f"{config.seed}/{step}"))
        batch = batch.union(report.batch)
    if report.reward_kl is not None:
        components.kl.update(report.reward_kl)
    with ThreadPoolExecutor(1, "samples") as writer:
        kept = None if components.samples is None else writer.submit(components.samples.write, batch, step)
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
    """Mini-batches of `batch.mini_batch_size` whole groups, in a random order that seed and step determine.

    One that has no row for every rank, since the groups of a policy may have few, is joined to its neighbour.
    """
    groups: dict[Any, Sequence[int]] = batch.positions("group_id")
    order = sorted(groups)
    random.Random(f"{config.seed}/{step}").shuffle(order)
    size, chosen = config.batch.mini_batch_size, list[list[int]]()
    for at in range(0, len(order), size):
        rows = [*chain.from_iterable([groups[g] for g in order[at : at + size]])]
        if chosen and min(len(rows), len(chosen[-1])) < config.engine.world_size:
            chosen[-1] += rows
        else:
            chosen.append(rows)
    return [batch.reorder(rows) for rows in chosen]
