"""Kahneman-Tversky optimisation: completions that are good or bad by themselves, no pairs needed (2402.01306).

A data row is `{"prompt": [chat messages], "completion": "text", "label": true or false}`, or has `prompt_token_ids` and
`completion_token_ids` for the first two; a pair as in `rl_engine.finetune.dpo` is one good row and one bad one. The
reference is the model as it was loaded. The reference point of a step is estimated on prompts with the completion of
another row, dealt once; only the policy's log-probs of those are computed anew.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.errors import DataError
from rl_engine.finetune.data import ChatTokenizer, Columns, read_rows, refuse_empty
from rl_engine.finetune.loop import Rows
from rl_engine.losses import row_log_ratio, row_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput
    from rl_engine.worker import TrainingWorker

_SHAPES = (
    ("prompt", "completion", "label"),
    ("prompt_token_ids", "completion_token_ids", "label"),
    ("prompt", "chosen", "rejected"),
    ("prompt_token_ids", "chosen_token_ids", "rejected_token_ids"),
)


def tokenize_labelled(path: str | Path, model_path: str | Path) -> Rows:
    """Read a JSONL file of judged completions.

    Raises:
        DataError: names the row (from 1) and what is wrong with it, or all rows are alike.
    """
    columns, tokenizer, labels, numbers = Columns(), ChatTokenizer(model_path), list[bool](), list[int]()
    for number, row in enumerate(read_rows(path, _SHAPES), start=1):
        prompt = row["prompt_token_ids"] if "prompt_token_ids" in row else tokenizer.prompt(row["prompt"])
        for completion, label in _judged(row, tokenizer):
            if not isinstance(label, bool):
                raise DataError(f"{path}: row {number} has label {label!r}; wanted true or false.")
            columns.add(prompt, completion)
            labels.append(label)
            numbers.append(number)
    refuse_empty(path, columns, numbers)
    if len(set(labels)) < 2:
        raise DataError(f"{path}: every label is {str(labels[0]).lower()}; there is nothing to tell apart.")
    return Rows(columns=columns.batch(is_desirable=torch.tensor(labels)))


def mismatched(rows: Rows, seed: int) -> Rows:
    """Every prompt with the completion of another row."""
    prompts, completions = (
        [part.tolist() for part in rows.columns.get(name).unbind()]
        for name in ("prompt_token_ids", "completion_token_ids")
    )
    shift = random.Random(seed).randrange(1, len(prompts))
    columns = Columns()
    for index, prompt in enumerate(prompts):
        columns.add(prompt, completions[(index + shift) % len(completions)])
    return Rows(columns=columns.batch())


def divergence(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean log-ratio of policy and reference over rows, as a loss function that is never differentiated."""
    return row_mean(row_log_ratio(output, rows), output), {}


def with_reference_point(worker: TrainingWorker, data: TensorDict, other: TensorDict) -> TensorDict:
    """`data` with the batch's `reference_point`, from `other`, its mismatched rows. Collective."""
    estimate = max(0.0, worker.forward(other, divergence).metrics.get("loss", 0.0))
    data["reference_point"] = torch.full((len(data),), estimate)
    return data


def _judged(row: Mapping[str, Any], tokenizer: ChatTokenizer) -> Sequence[tuple[list[int], Any]]:
    if "chosen_token_ids" in row:
        return (row["chosen_token_ids"], True), (row["rejected_token_ids"], False)
    if "chosen" in row:
        return (tokenizer.completion(row["chosen"]), True), (tokenizer.completion(row["rejected"]), False)
    given = row["completion_token_ids"] if "prompt_token_ids" in row else tokenizer.completion(row["completion"])
    return ((given, row["label"]),)
