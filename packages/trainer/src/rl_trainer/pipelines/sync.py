"""On-policy training: generate with the current weights, learn from it, hand the new weights to the servers, repeat.

Knows: the order of a step, and that every token must come from the current version, but for what is replayed
(`batch.replay`). Does not know: where anything runs, how tensors travel, which engine trains or which server generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_trainer.metrics import PhaseTimer, StepRecord
from rl_trainer.pipelines.replay import generate
from rl_trainer.pipelines.step import ages_of, is_eval_due, learn, record_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_trainer.config import Config
    from rl_trainer.data import Row
    from rl_trainer.pipelines.parts import Parts

_PARTITION = "train"


def run_sync(parts: Parts, config: Config, eval_rows: Sequence[Row], *, start_step: int = 0) -> Iterator[StepRecord]:
    """Train, yielding a record after every step. Step 0's record is the evaluation of the start policy.

    The servers hold weight version `step + 1` when step `step` has been yielded.
    """
    timer = PhaseTimer()
    version = start_step + 1
    with timer.phase("weight_sync"):
        parts.weights.sync(version)
    with timer.phase("eval"):
        accuracy = parts.rollout_manager.evaluate(eval_rows)
    yield StepRecord.of_evaluation(start_step, accuracy, timer.take(), position=parts.rollout_manager.position)

    for step in range(start_step + 1, config.steps + 1):
        with timer.phase("generate"):
            generated = generate(parts, config, _PARTITION, step)
        ages = ages_of(generated, version=version, bound=0, replay=config.batch.replay)
        with timer.phase("yield_memory"):
            parts.weights.yield_memory()
        updates = learn(parts, config, generated.batch, step, timer)
        version = step + 1
        with timer.phase("weight_sync"):
            parts.weights.sync(version)
        if parts.replay is not None:
            parts.replay.keep(generated, version)
        parts.queue.clear(_PARTITION)
        accuracy = None
        if is_eval_due(config, step):
            with timer.phase("eval"):
                accuracy = parts.rollout_manager.evaluate(eval_rows)
        yield record_of(step, generated, ages, updates, accuracy, timer.take())
