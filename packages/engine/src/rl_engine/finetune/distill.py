"""Distillation: a student learns a teacher's distribution, with nothing but an engine.

Data rows are those of `rl_engine.finetune.sft`. The teacher scores them all before the first step and is then let go,
so that the two models are never held at once. `loss=forward` takes its likeliest tokens at every position, whoever
wrote the completion; `reverse` and `mixed` take its log-probs of the completion, which should be the student's own
words (on-policy distillation, GKD, 2306.13649): collect them with a rollout server and give the file here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rl_engine.errors import ConfigError, DataError
from rl_engine.finetune.images import ENCODED
from rl_engine.finetune.loop import Rows, RunConfig, score_all, train
from rl_engine.finetune.sft import tokenize_file
from rl_engine.losses import DistillKind, DistillLoss
from rl_engine.training_worker import TrainingWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.base import LossFunction
    from rl_engine.types import EngineConfig

__all__ = ["DistillConfig", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(RunConfig):
    """Configuration of a distillation run. `model_path` is the student's."""

    teacher_path: str
    """The teacher's folder, with the same tokenizer."""
    batch_size: int = 32
    """Rows per step, over all ranks."""
    lr: float = 1e-5
    """Peak learning rate."""
    loss: DistillKind = DistillKind.FORWARD
    """Direction of the divergence."""
    forward_weight: float = 0.5
    """Weight of the forward part; with `mixed` alone."""
    num_candidates: int = 16
    """Number of the teacher's likeliest tokens that the forward part compares; not with `reverse`."""

    @property
    def other_engines(self) -> tuple[EngineConfig, ...]:
        """See `RunConfig`: the teacher."""
        return (
            replace(
                self.engine,
                model_path=self.teacher_path,
                optimizer=None,
                num_candidates=0 if self.loss == DistillKind.REVERSE else self.num_candidates,
                activation_checkpointing=False,
            ),
        )

    @property
    def loss_function(self) -> LossFunction:
        """See `RunConfig`."""
        return DistillLoss(kind=self.loss, forward_weight=self.forward_weight)

    @property
    def may_drop_out(self) -> bool:
        """See `RunConfig`."""
        return False

    def check_own(self) -> None:
        """See `RunConfig`."""
        if self.num_candidates < 1 or not 0 < self.forward_weight < 1:
            raise ConfigError(
                f"num_candidates is {self.num_candidates} and forward_weight {self.forward_weight}; "
                "num_candidates must be 1 or more, forward_weight between 0 and 1."
            )
        idle = {"forward_weight": self.loss != DistillKind.MIXED, "num_candidates": self.loss == DistillKind.REVERSE}
        for field in fields(self):
            if idle.get(field.name) and getattr(self, field.name) != field.default:
                raise ConfigError(f"{field.name} does nothing with loss={self.loss}; leave it out.")

    def read(self, path: str) -> Rows:
        """See `RunConfig`."""
        _check_tokenizers(self.model_path, self.teacher_path)
        columns = tokenize_file(path, self.model_path)
        if ENCODED in columns.keys():  # noqa: SIM118 - a TensorDict iterates rows
            raise DataError(
                f"{path} has images or videos, which rl-distill does not show to a teacher; leave those rows out."
            )
        return Rows(columns=columns)

    def score_files(self, files: Sequence[Rows]) -> None:
        """Add what the loss reads of the teacher. Collective."""
        names = {"logprobs": "teacher_logprobs"}
        if self.loss != DistillKind.REVERSE:
            names |= {"candidate_token_ids": "candidate_token_ids", "candidate_logprobs": "teacher_candidate_logprobs"}
        with TrainingWorker(self.other_engines[0], self.backend) as teacher:
            for rows in files:
                scored = score_all(teacher, rows.columns, list(names))
                for name, column in names.items():
                    rows.columns[column] = scored[name]


def _check_tokenizers(student: str, teacher: str) -> None:
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
