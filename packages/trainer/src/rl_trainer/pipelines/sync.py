"""On-policy training: generate with the current weights, learn from it, hand the new weights to the servers, repeat.

Knows: the order of a step, and that every token must come from the current version, but for what is replayed
(`batch.replay`). Does not know: where anything runs, how tensors travel, which engine trains or which server generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_trainer.metrics import PhaseTimer
from rl_trainer.pipelines.replay import generate
from rl_trainer.pipelines.step import ages_of, begin, evaluate, is_eval_due, learn, record_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_trainer.config import Config
    from rl_trainer.data import Row
    from rl_trainer.metrics import StepRecord
    from rl_trainer.pipelines.parts import Parts

_PARTITION = "train"


def run_sync(parts: Parts, config: Config, eval_rows: Sequence[Row], *, start_step: int = 0) -> Iterator[StepRecord]:
    """Train, yielding a record after every step. Step 0's record is the evaluation of the start policy.

    The servers hold weight version `step + 1` when step `step` has been yielded.
    """
    timer = PhaseTimer()
    yield begin(parts, eval_rows, start_step, timer)

    for step in range(start_step + 1, config.steps + 1):
        with timer.phase("generate"):
            generated = generate(parts, config, _PARTITION, step)
        ages = ages_of(generated, version=step, bound=0, replay=config.batch.replay)
        with timer.phase("yield_memory"):
            parts.weights.yield_memory()
        updates = learn(parts, config, generated.batch, step, timer)
        with timer.phase("weight_sync"):
            parts.weights.sync(step + 1)
        if parts.replay is not None:
            parts.replay.keep(generated, step + 1)
        parts.queue.clear(_PARTITION)
        accuracy = evaluate(parts, eval_rows, timer) if is_eval_due(config, step) else None
        yield record_of(step, generated, ages, updates, accuracy, timer.take())
