"""Learning from preferences with nothing but an engine: DPO and its kin, KTO, and reward models.

A data row is `{"prompt": [chat messages], "chosen": "text", "rejected": "text"}`, or has `prompt_token_ids`,
`chosen_token_ids` and `rejected_token_ids`. The reference of `rl-dpo` is the model as it was loaded: its log-probs of
all rows are computed before the first step, so that no second model is held.

With `rl-dpo loss=kto` (2402.01306) a row may also be `{"prompt": ..., "completion": "text", "label": true or false}`,
or have `completion_token_ids`; a pair is one good row and one bad one. The reference point of a step is estimated on
prompts with the completion of another row, dealt once; only the policy's log-probs of those are computed anew.

`rl-rm` learns Bradley-Terry rewards from pairs, or with `loss=process` from `{"prompt": [chat messages], "steps":
["text", ...], "labels": [0 to 1, ...]}`, where each step's last token is judged. The folder written is a Hugging Face
sequence classifier with one label.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.batch.packed import ragged, ragged_batch
from rl_engine.batch.row_batch import RowBatch
from rl_engine.checkpoint.hf_folder import padding_id, read_config
from rl_engine.errors import ConfigError, DataError
from rl_engine.finetune.data import ChatTokenizer, Columns, pair_of, read_rows, refuse_empty
from rl_engine.finetune.images import ENCODED, SIZES, ImageReader, with_pixels
from rl_engine.finetune.loop import Rows, RunConfig, score_all, train
from rl_engine.losses import DpoKind, DpoLoss, KtoLoss, process_reward_loss, reward_loss, row_log_ratio, row_mean
from rl_engine.types import Head, LoraExport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.training_worker import TrainingWorker
    from rl_engine.types import EngineConfig, ModelOutput

__all__ = [
    "DpoConfig",
    "RewardKind",
    "RmConfig",
    "divergence",
    "tokenize_labelled",
    "tokenize_pairs",
    "tokenize_steps",
    "train",
]

_PAIRS = (("chosen", "rejected"), ("prompt_token_ids", "chosen_token_ids", "rejected_token_ids"))
_LABELLED = (("prompt", "completion", "label"), ("prompt_token_ids", "completion_token_ids", "label"), *_PAIRS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(RunConfig):
    """Configuration of a preference optimisation run. `batch_size` counts pairs, or rows with `loss=kto`."""

    batch_size: int = 32
    """Pairs per step, over all ranks."""
    lr: float = 1e-6
    """Peak learning rate."""
    loss: DpoKind = DpoKind.SIGMOID
    """Loss of the margin; `kto` learns from single rows."""
    beta: float = 0.1
    """Weight of staying near the reference."""
    label_smoothing: float = 0.0
    """Probability that a label is the wrong way round; sigmoid only."""
    reference_free: bool = False
    """Leave the reference out."""
    desirable_weight: float = 1.0
    """Weight of good rows; kto only."""
    undesirable_weight: float = 1.0
    """Weight of bad rows; kto only."""

    @property
    def loss_function(self) -> LossFunction:
        """See `RunConfig`."""
        if self.loss == DpoKind.KTO:
            return KtoLoss(
                beta=self.beta,
                desirable_weight=self.desirable_weight,
                undesirable_weight=self.undesirable_weight,
            )
        return DpoLoss(
            kind=self.loss,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            is_reference_free=self.reference_free,
        )

    @property
    def may_drop_out(self) -> bool:
        """See `RunConfig`."""
        return False

    def check_own(self) -> None:
        """See `RunConfig`."""
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"beta is {self.beta} and label_smoothing {self.label_smoothing}; "
                "beta must be above 0, label_smoothing in [0, 0.5)."
            )
        if self.label_smoothing and self.loss != DpoKind.SIGMOID:
            raise ConfigError(f"label_smoothing does nothing with loss={self.loss}; leave it out.")
        weights = (self.desirable_weight, self.undesirable_weight)
        if self.loss != DpoKind.KTO and weights != (1.0, 1.0):
            raise ConfigError(
                f"desirable_weight and undesirable_weight do nothing with loss={self.loss}; leave them out."
            )
        if min(weights) <= 0:
            raise ConfigError(f"desirable_weight and undesirable_weight are {weights}; they must be above 0.")
        if self.loss == DpoKind.KTO and self.reference_free:
            raise ConfigError("loss=kto compares with the reference; leave reference_free out.")

    def read(self, path: str) -> Rows:
        """See `RunConfig`."""
        return (tokenize_labelled if self.loss == DpoKind.KTO else tokenize_pairs)(path, self.model_path)

    def prepare(self, worker: TrainingWorker, rows: Rows) -> Rows:
        """Add the reference's log-probs, and for KTO mismatched rows with theirs. Collective."""
        if self.reference_free:
            return rows
        other = _mismatched(rows, self.seed) if self.loss == DpoKind.KTO else None
        for columns in (rows.columns, other):
            if columns is not None:
                columns["ref_logprobs"] = score_all(worker, columns, ["logprobs"])["logprobs"]
        if other is None:
            return rows
        return replace(rows, mismatched=RowBatch(other, needs_mask=True, device=torch.device("cpu")))

    def complete(self, worker: TrainingWorker, rows: Rows, chosen: list[int], mine: TensorDict) -> TensorDict:
        """Add the batch's `reference_point`, for KTO. Collective."""
        if rows.mismatched is not None:
            found = worker.forward(with_pixels(rows.mismatched.select(chosen)), divergence).metrics
            mine["reference_point"] = torch.full((len(mine),), max(0.0, found.get("loss", 0.0)))
        return mine


def divergence(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean log-ratio of policy and reference over rows, as a loss function that is never differentiated."""
    return row_mean(row_log_ratio(output, rows), output), {}


def tokenize_pairs(path: str | Path, model_path: str | Path) -> Rows:
    """Read a JSONL file of preferences: two rows per pair, the chosen one first.

    Raises:
        DataError: names the row (from 1) and what is wrong with it.
    """
    columns, numbers = Columns(ImageReader(model_path)), list[int]()

    def use(row: Mapping[str, Any], number: int, tokenizer: ChatTokenizer) -> None:
        if "prompt_token_ids" in row:
            prompt, both = row["prompt_token_ids"], (row["chosen_token_ids"], row["rejected_token_ids"])
        else:
            prompt, *both = _tokenized_pair(row, tokenizer)
        for completion in both:
            columns.add(prompt, completion, images=tokenizer.images)
            numbers.append(number)

    read_rows(path, model_path, _PAIRS, use)
    index = torch.arange(len(columns.prompts))
    refuse_empty(path, columns, numbers)
    return Rows(columns=columns.batch(pair_id=index // 2, is_chosen=index % 2 == 0), rows_per_item=2)


def tokenize_labelled(path: str | Path, model_path: str | Path) -> Rows:
    """Read a JSONL file of judged completions.

    Raises:
        DataError: names the row (from 1) and what is wrong with it, or all rows are alike.
    """
    columns, labels, numbers = Columns(ImageReader(model_path)), list[bool](), list[int]()

    def use(row: Mapping[str, Any], number: int, tokenizer: ChatTokenizer) -> None:
        for prompt, completion, label in _judged(row, tokenizer):
            if not isinstance(label, bool):
                raise DataError(f"has label {label!r}; wanted true or false")
            columns.add(prompt, completion, images=tokenizer.images)
            labels.append(label)
            numbers.append(number)

    read_rows(path, model_path, _LABELLED, use)
    refuse_empty(path, columns, numbers)
    if len(set(labels)) < 2:
        raise DataError(f"{path}: every label is {str(labels[0]).lower()}; there is nothing to learn.")
    return Rows(columns=columns.batch(is_desirable=torch.tensor(labels)))


def _mismatched(rows: Rows, seed: int) -> TensorDict:
    """Every prompt with the completion of another row."""
    prompts, completions = (
        [part.tolist() for part in rows.columns.get(name).unbind()]
        for name in ("prompt_token_ids", "completion_token_ids")
    )
    shift = random.Random(seed).randrange(1, len(prompts))
    images = {name: rows.columns.get(name) for name in (ENCODED, *SIZES) if name in rows.columns.keys()}  # noqa: SIM118
    return ragged_batch(prompts, [*completions[shift:], *completions[:shift]]).update(images)


def _judged(row: Mapping[str, Any], tokenizer: ChatTokenizer) -> Sequence[tuple[list[int], list[int], Any]]:
    """(prompt, completion, whether it is good) of each completion of a row."""
    if "chosen_token_ids" in row:
        prompt = row["prompt_token_ids"]
        return (prompt, row["chosen_token_ids"], True), (prompt, row["rejected_token_ids"], False)
    if "chosen" in row:
        prompt, chosen, rejected = _tokenized_pair(row, tokenizer)
        return (prompt, chosen, True), (prompt, rejected, False)
    if "prompt_token_ids" in row:
        return ((row["prompt_token_ids"], row["completion_token_ids"], row["label"]),)
    return ((*tokenizer.turn(row["prompt"], row["completion"]), row["label"]),)


def _tokenized_pair(row: Mapping[str, Any], tokenizer: ChatTokenizer) -> tuple[list[int], list[int], list[int]]:
    prompt, chosen, rejected = pair_of(row)
    if not prompt:
        raise DataError("has no prompt; give prompt, or chosen and rejected as whole chats")
    ids, chosen_ids = tokenizer.turn(prompt, chosen)
    return ids, chosen_ids, tokenizer.turn(prompt, rejected)[1]


class RewardKind(StrEnum):
    """Kind of reward model."""

    OUTCOME = "outcome"
    """Outcome reward from pairs (Bradley-Terry)."""
    PROCESS = "process"
    """Value of each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RmConfig(RunConfig):
    """Configuration of a reward modelling run. `batch_size` counts pairs, or rows with `loss=process`."""

    batch_size: int = 32
    """Pairs (or rows) per step, over all ranks."""
    lr: float = 1e-5
    """Peak learning rate."""
    loss: RewardKind = RewardKind.OUTCOME
    """Kind of reward model."""

    @property
    def engine(self) -> EngineConfig:
        """See `RunConfig`."""
        return self.engine_with(head=Head.REWARD)

    def check_own(self) -> None:
        """See `RunConfig`: a folder that can pad rows without hiding their last token."""
        found = padding_id(self.model_path)
        set_one = read_config(Path(self.model_path)).get_text_config().pad_token_id
        if self.lora_rank and self.lora_export == LoraExport.ADAPTER and set_one not in (None, found):
            raise ConfigError(
                f"lora.export=adapter writes the adapter alone, and {self.model_path} pads with token {set_one}, which "
                f"ends a turn: transformers would score the token before it. Set pad_token_id={found} in its "
                "config.json and that token in its tokenizer_config.json, or lora.export=merged."
            )

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
    columns, labels, numbers = Columns(ImageReader(model_path)), list[list[float]](), list[int]()

    def use(row: Mapping[str, Any], number: int, tokenizer: ChatTokenizer) -> None:
        pieces = [tokenizer.ids(step) for step in row["steps"]]
        if len(pieces) != len(row["labels"]) or not all(pieces):
            raise DataError(
                f"has {len(pieces)} steps and {len(row['labels'])} labels; "
                "wanted one label for each step, and no step empty"
            )
        ends = [at == len(piece) - 1 for piece in pieces for at in range(len(piece))]
        of_step = [label for piece, label in zip(pieces, row["labels"], strict=True) for _ in piece]
        columns.add(
            tokenizer.prompt(row["prompt"]),
            [token for piece in pieces for token in piece],
            list(map(int, ends)),
            tokenizer.images,
        )
        labels.append([float(label) for label in of_step])
        numbers.append(number)

    read_rows(path, model_path, (("prompt", "steps", "labels"),), use)
    refuse_empty(path, columns, numbers)
    return Rows(columns=columns.batch(step_labels=ragged(labels, torch.float32)))
