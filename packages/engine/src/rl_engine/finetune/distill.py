"""Distillation: a student learns a teacher's distribution, with nothing but an engine.

Data rows are those of `rl_engine.finetune.sft`. The teacher scores them all before the first step and is then let go,
so that the two models are never held at once. `loss=forward` takes its likeliest tokens at every position, whoever
wrote the completion; `reverse` and `mixed` take its log-probs of the completion, which should be the student's own
words (on-policy distillation, GKD, 2306.13649): collect them with a rollout server and give the file here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rl_engine.errors import ConfigError
from rl_engine.finetune import loop
from rl_engine.finetune.loop import Rows, RunConfig, RunReport
from rl_engine.finetune.sft import tokenize_file
from rl_engine.losses import DistillKind, DistillLoss
from rl_engine.worker import TrainingWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tensordict import TensorDict

    from rl_engine.types import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(RunConfig):
    """One run of distillation. `model_path` is the student's."""

    teacher_path: str
    """The teacher's folder, with the same tokenizer."""
    batch_size: int = 32
    """Rows per step, over all ranks."""
    lr: float = 1e-5
    """Peak learning rate."""
    loss: DistillKind = DistillKind.FORWARD
    """Which way the student is pulled."""
    forward_weight: float = 0.5
    """Of the forward part; with `mixed` alone."""
    num_candidates: int = 16
    """Of the teacher's likeliest tokens that the forward part compares; not with `reverse`."""


def train(config: DistillConfig, report: Callable[[str], None] = print) -> RunReport:
    """Train and write `output_dir`. Every rank calls it; rank 0 reports.

    Raises:
        ConfigError: a number is out of range, or teacher and student have different tokenizers.
        DataError: a data file is missing, or one of its rows cannot be used.
        ModelFolderError: a model folder cannot be loaded.
        NonFiniteError: a gradient is NaN or infinite.
    """
    started = time.perf_counter()
    loop.check(config)
    if config.num_candidates < 1 or not 0 < config.forward_weight < 1:
        raise ConfigError(
            f"num_candidates is {config.num_candidates} and forward_weight {config.forward_weight}; "
            "num_candidates must be 1 or more, forward_weight between 0 and 1."
        )
    idle = {
        "forward_weight": config.loss != DistillKind.MIXED,
        "num_candidates": config.loss == DistillKind.REVERSE,
    }
    for field in fields(config):
        if idle.get(field.name) and getattr(config, field.name) != field.default:
            raise ConfigError(f"{field.name} does nothing with loss={config.loss}; leave it out.")
    loop.check_parts(config, loop.engine_config(config), _teacher(config))
    _check_tokenizers(config.model_path, config.teacher_path)
    paths = [path for path in (config.data_path, config.eval_path) if path is not None]
    files = [tokenize_file(path, config.model_path) for path in paths]
    add_teacher(config, files)
    data, *held_out = [Rows(columns=columns) for columns in files]
    loss = DistillLoss(kind=config.loss, forward_weight=config.forward_weight)
    with TrainingWorker(loop.engine_config(config), config.backend) as worker:
        return loop.run(config, worker, loss, data, held_out[0] if held_out else None, report, started)


def add_teacher(config: DistillConfig, files: Sequence[TensorDict]) -> None:
    """Add what the loss reads of the teacher to the columns of each file. Collective."""
    names = {"logprobs": "teacher_logprobs"}
    if config.loss != DistillKind.REVERSE:
        names |= {"candidate_token_ids": "candidate_token_ids", "candidate_logprobs": "teacher_candidate_logprobs"}
    with TrainingWorker(_teacher(config), config.backend) as teacher:
        for columns in files:
            scored = loop.score_all(teacher, columns, list(names))
            for name, column in names.items():
                columns[column] = scored[name]


def _teacher(config: DistillConfig) -> EngineConfig:
    """The engine that scores the files."""
    return replace(
        loop.engine_config(config),
        model_path=config.teacher_path,
        optimizer=None,
        num_candidates=0 if config.loss == DistillKind.REVERSE else config.num_candidates,
        activation_checkpointing=False,
    )


def _check_tokenizers(student: str | Path, teacher: str | Path) -> None:
    """Token ids must mean the same to both.

    Raises:
        ConfigError: they do not.
    """
    from transformers import AutoTokenizer

    try:
        mine, theirs = (
            AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False).get_vocab()
            for path in (student, teacher)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path and teacher.path need a tokenizer each, to compare them: {error}") from error
    if mine != theirs:
        raise ConfigError(
            f"The tokenizers of {student} and {teacher} differ ({len(mine)} and {len(theirs)} entries); "
            "a student learns from a teacher with its own tokens."
        )
