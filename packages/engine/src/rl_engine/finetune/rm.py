"""Reward models with nothing but an engine: Bradley-Terry on pairs, or process rewards on labelled steps.

A data row is a preference as in `rl_engine.finetune.dpo`. With `loss=process` it is `{"prompt": [chat messages],
"steps": ["text", ...], "labels": [0 to 1, ...]}`: each step's last token is judged. The folder written is a Hugging
Face sequence classifier with one label.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from rl_engine.batch.packed import ragged
from rl_engine.errors import DataError
from rl_engine.finetune.data import ChatTokenizer, Columns, read_rows, refuse_empty
from rl_engine.finetune.dpo import tokenize_pairs
from rl_engine.finetune.loop import Rows, RunConfig, train
from rl_engine.losses import process_reward_loss, reward_loss
from rl_engine.types import Head

if TYPE_CHECKING:
    from pathlib import Path

    from rl_engine.base import LossFunction
    from rl_engine.types import EngineConfig

__all__ = ["RewardKind", "RmConfig", "tokenize_steps", "train"]


class RewardKind(StrEnum):
    """What a reward model learns."""

    OUTCOME = "outcome"
    """Which of two completions is better (Bradley-Terry)."""
    PROCESS = "process"
    """How good each step is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RmConfig(RunConfig):
    """One run of reward modelling. `batch_size` counts pairs, or rows with `loss=process`."""

    batch_size: int = 32
    """Pairs (or rows) per step, over all ranks."""
    lr: float = 1e-5
    """Peak learning rate."""
    loss: RewardKind = RewardKind.OUTCOME
    """What to learn."""

    @property
    def engine(self) -> EngineConfig:
        """See `RunConfig`."""
        return self.engine_with(head=Head.REWARD)

    @property
    def loss_function(self) -> LossFunction:
        """See `RunConfig`."""
        return process_reward_loss if self.loss == RewardKind.PROCESS else reward_loss

    def read(self, path: str) -> Rows:
        """See `RunConfig`."""
        return (tokenize_steps if self.loss == RewardKind.PROCESS else tokenize_pairs)(path, self.model_path)


def tokenize_steps(path: str | Path, model_path: str | Path) -> Rows:
    """Read a JSONL file of labelled steps: one row each, `loss_mask` 1 at the last token of every step.

    Raises:
        DataError: names the row (from 1) and what is wrong with it.
    """
    columns, tokenizer, labels = Columns(), ChatTokenizer(model_path), list[list[float]]()
    for number, row in enumerate(read_rows(path, (("prompt", "steps", "labels"),)), start=1):
        pieces = [tokenizer.ids(step) for step in row["steps"]]
        if len(pieces) != len(row["labels"]) or not all(pieces):
            raise DataError(
                f"{path}: row {number} has {len(pieces)} steps and {len(row['labels'])} labels; "
                "wanted one label for each step, and no step empty."
            )
        ends = [at == len(piece) - 1 for piece in pieces for at in range(len(piece))]
        of_step = [label for piece, label in zip(pieces, row["labels"], strict=True) for _ in piece]
        columns.add(
            tokenizer.prompt(row["prompt"]), [token for piece in pieces for token in piece], list(map(int, ends))
        )
        labels.append([float(label) for label in of_step])
    refuse_empty(path, columns)
    return Rows(columns=columns.batch(step_labels=ragged(labels, torch.float32)))
