"""Fully asynchronous: the servers never wait for the trainer, and the trainer waits for whole groups only.

Knows: the order of a step, and how old a token may be. Prompts are released ahead, as far as the staleness policy
admits; new weights reach the servers while they generate, so that one completion may hold tokens of several versions.
With `staleness.max_staleness=0` nothing is released before the weights that shall generate it: the losses are those
of `sync`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_trainer.metrics import PhaseTimer
from rl_trainer.pipelines.staleness import create_policy
from rl_trainer.pipelines.step import ages_of, begin, evaluate, is_eval_due, learn, record_of
from rl_trainer.pipelines.stream import RolloutStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_trainer.config import Config
    from rl_trainer.data import Row
    from rl_trainer.metrics import StepRecord
    from rl_trainer.pipelines.parts import Parts


def run_fully_async(
    parts: Parts, config: Config, eval_rows: Sequence[Row], *, start_step: int = 0
) -> Iterator[StepRecord]:
    """Train, yielding a record after every step. Step 0's record is the evaluation of the start policy.

    The servers hold weight version `step + 1` when step `step` has been yielded. The record's `pending` are the prompts
    that are being generated then, its `held` those that wait to be learned from.
    """
    timer = PhaseTimer()
    first = start_step + 1
    policy = create_policy(config)
    yield begin(parts, eval_rows, start_step, timer)

    stream = RolloutStream(parts.agents, parts.rollout_manager, parts.queue, config, policy, first)
    stream.take_over(parts.held)
    stream.release(first)
    for step in range(first, config.steps + 1):
        with timer.phase("wait_generate"):
            generated = stream.take(step)
        ages = ages_of(generated, version=step, bound=policy.bound)
        updates = learn(parts, config, generated.batch, step, timer)
        with timer.phase("weight_sync"):
            parts.weights.sync(step + 1)
        parts.queue.clear(generated.batch)
        stream.release(step + 1)
        accuracy = evaluate(parts, eval_rows, timer) if is_eval_due(config, step) else None
        record = record_of(step, generated, ages, updates, accuracy, timer.take())
        yield replace(record, position=parts.rollout_manager.position, pending=stream.pending, held=stream.held)
