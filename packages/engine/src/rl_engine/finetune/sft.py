"""Supervised fine-tuning on prompt-completion pairs or whole chats, with nothing but an engine.

A data row is `{"prompt": [chat messages], "completion": "text"}`, `{"messages": [chat messages]}` (every assistant turn
is learned), or has `prompt_token_ids`, `completion_token_ids` and perhaps `loss_mask`. The loss is the token negative
log-likelihood. Packing, data parallelism (start with torchrun) and accumulation are the engine's business.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_engine.errors import DataError
from rl_engine.finetune import loop
from rl_engine.finetune.data import ChatTokenizer, Columns, read_rows, refuse_empty
from rl_engine.finetune.loop import Rows, RunConfig, RunReport
from rl_engine.losses import sft_loss
from rl_engine.types import ModelInit
from rl_engine.worker import TrainingWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tensordict import TensorDict

_SHAPES = (("prompt", "completion"), ("messages",), ("prompt_token_ids", "completion_token_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(RunConfig):
    """One run of supervised fine-tuning."""

    init: ModelInit = ModelInit.PRETRAINED
    """random: start from new weights; the folder then needs only config and tokenizer."""
    target_loss: float | None = None
    """Stop once the mean loss of the last `log_every` steps is at or below it."""
    target_sequence_accuracy: float | None = None
    """Stop once the mean sequence accuracy of the last `log_every` steps is at or above it, each measured on a batch
    before it is learned from."""


def train(config: SftConfig, report: Callable[[str], None] = print) -> RunReport:
    """Train and write `output_dir`. Every rank calls it; rank 0 reports.

    Args:
        config: What to do.
        report: Takes one progress line at a time.

    Raises:
        ConfigError: a number is out of range.
        DataError: a data file is missing, or one of its rows cannot be used.
        ModelFolderError: the model folder cannot be loaded.
        NonFiniteError: a gradient is NaN or infinite.
    """
    started = time.perf_counter()
    engine = loop.engine_config(config, init=config.init)
    loop.check(config)
    loop.check_parts(config, engine)
    data, held_out = (
        None if path is None else Rows(columns=tokenize_file(path, config.model_path))
        for path in (config.data_path, config.eval_path)
    )
    assert data is not None

    def is_reached(means: Mapping[str, float]) -> bool:
        loss, accuracy = config.target_loss, config.target_sequence_accuracy
        return (loss is not None and means["loss"] <= loss) or (
            accuracy is not None and means["sequence_accuracy"] >= accuracy
        )

    with TrainingWorker(engine, config.backend) as worker:
        return loop.run(config, worker, sft_loss, data, held_out, report, started, is_reached)


def tokenize_file(path: str | Path, model_path: str | Path) -> TensorDict:
    """Read a JSONL file into the jagged columns that an engine takes.

    Raises:
        DataError: names the row (from 1) and what is wrong with it.
    """
    columns, tokenizer = Columns(), ChatTokenizer(model_path)
    for number, row in enumerate(read_rows(path, _SHAPES), start=1):
        if "prompt_token_ids" in row:
            mask, completion = row.get("loss_mask"), row["completion_token_ids"]
            if mask is not None and len(mask) != len(completion):
                raise DataError(f"{path}: row {number} has {len(mask)} of loss_mask for {len(completion)} tokens.")
            columns.add(row["prompt_token_ids"], completion, mask)
        elif "messages" in row:
            try:
                columns.add(*tokenizer.conversation(row["messages"]))
            except DataError as error:
                raise DataError(f"{path}: row {number}: {error}.") from error
        else:
            columns.add(tokenizer.prompt(row["prompt"]), tokenizer.completion(row["completion"]))
    refuse_empty(path, columns)
    return columns.batch()
