"""Direct preference optimisation on pairs of completions, with nothing but an engine.

A data row is `{"prompt": [chat messages], "chosen": "text", "rejected": "text"}`, or has `prompt_token_ids`,
`chosen_token_ids` and `rejected_token_ids`. The reference is the model as it was loaded: its log-probs of all rows are
computed before the first step, so that no second model is held.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_engine.batch.row_batch import RowBatch
from rl_engine.errors import ConfigError
from rl_engine.finetune import loop
from rl_engine.finetune.data import ChatTokenizer, Columns, read_rows, refuse_empty
from rl_engine.finetune.kto import mismatched, tokenize_labelled, with_reference_point
from rl_engine.finetune.loop import Rows, RunConfig, RunReport
from rl_engine.losses import DpoKind, DpoLoss, KtoLoss
from rl_engine.worker import TrainingWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tensordict import TensorDict

_SHAPES = (("prompt", "chosen", "rejected"), ("prompt_token_ids", "chosen_token_ids", "rejected_token_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(RunConfig):
    """One run of preference optimisation. `batch_size` counts pairs, or rows with `loss=kto`."""

    batch_size: int = 32
    """Pairs per step, over all ranks."""
    lr: float = 1e-6
    """Peak learning rate."""
    loss: DpoKind = DpoKind.SIGMOID
    """How the margin becomes a loss; `kto` learns from single rows, see `rl_engine.finetune.kto`."""
    beta: float = 0.1
    """Weight of staying near the reference."""
    label_smoothing: float = 0.0
    """Probability that a label is the wrong way round; sigmoid only."""
    reference_free: bool = False
    """Leave the reference out."""
    desirable_weight: float = 1.0
    """Of good rows; kto only."""
    undesirable_weight: float = 1.0
    """Of bad rows; kto only."""


def train(config: DpoConfig, report: Callable[[str], None] = print) -> RunReport:
    """Train and write `output_dir`. Every rank calls it; rank 0 reports.

    Raises:
        ConfigError: a number is out of range.
        DataError: a data file is missing, or one of its rows cannot be used.
        ModelFolderError: the model folder cannot be loaded.
        NonFiniteError: a gradient is NaN or infinite.
    """
    started = time.perf_counter()
    loop.check(config)
    if config.beta <= 0 or not 0 <= config.label_smoothing < 0.5:
        raise ConfigError(
            f"beta is {config.beta} and label_smoothing {config.label_smoothing}; "
            "beta must be above 0, label_smoothing in [0, 0.5)."
        )
    if config.label_smoothing and config.loss != DpoKind.SIGMOID:
        raise ConfigError(f"label_smoothing does nothing with loss={config.loss}; leave it out.")
    _check_kto(config)
    loop.check_parts(config, loop.engine_config(config))
    if config.loss == DpoKind.KTO:
        return _train_kto(config, report, started)
    data = tokenize_pairs(config.data_path, config.model_path)
    held_out = None if config.eval_path is None else tokenize_pairs(config.eval_path, config.model_path)
    loss = DpoLoss(
        kind=config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        is_reference_free=config.reference_free,
    )
    with TrainingWorker(loop.engine_config(config), config.backend) as worker:
        if not config.reference_free:
            for rows in (data, held_out):
                if rows is not None:
                    _add_reference(worker, rows)
        return loop.run(config, worker, loss, data, held_out, report, started)


def _train_kto(config: DpoConfig, report: Callable[[str], None], started: float) -> RunReport:
    data = tokenize_labelled(config.data_path, config.model_path)
    held_out = None if config.eval_path is None else tokenize_labelled(config.eval_path, config.model_path)
    loss = KtoLoss(
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    with TrainingWorker(loop.engine_config(config), config.backend) as worker:
        others: dict[int, RowBatch] = {}
        for rows in (data, held_out):
            if rows is not None:
                other = mismatched(rows, config.seed)
                _add_reference(worker, rows)
                _add_reference(worker, other)
                others[id(rows)] = RowBatch(other.columns, needs_mask=True, device=torch.device("cpu"))

        def complete(worker: TrainingWorker, rows: Rows, chosen: list[int], mine: TensorDict) -> TensorDict:
            return with_reference_point(worker, mine, others[id(rows)].select(chosen))

        return loop.run(config, worker, loss, data, held_out, report, started, complete=complete)


def _add_reference(worker: TrainingWorker, rows: Rows) -> None:
    """Adds `ref_logprobs`, the log-probs of the weights as they are now."""
    rows.columns["ref_logprobs"] = loop.score_all(worker, rows.columns, ["logprobs"])["logprobs"]


def _check_kto(config: DpoConfig) -> None:
    weights = (config.desirable_weight, config.undesirable_weight)
    if config.loss == DpoKind.KTO:
        if min(weights) <= 0:
            raise ConfigError(f"desirable_weight and undesirable_weight are {weights}; they must be above 0.")
        if config.reference_free:
            raise ConfigError("loss=kto compares with the reference; leave reference_free out.")
    elif weights != (1.0, 1.0):
        raise ConfigError(
            f"desirable_weight and undesirable_weight do nothing with loss={config.loss}; leave them out."
        )


def tokenize_pairs(path: str | Path, model_path: str | Path) -> Rows:
    """Read a JSONL file of preferences: two rows per pair, the chosen one first.

    Raises:
        DataError: names the row (from 1) and what is wrong with it.
    """
    columns, tokenizer = Columns(), ChatTokenizer(model_path)
    for row in read_rows(path, _SHAPES):
        if "prompt_token_ids" in row:
            prompt, both = row["prompt_token_ids"], (row["chosen_token_ids"], row["rejected_token_ids"])
        else:
            prompt = tokenizer.prompt(row["prompt"])
            both = (tokenizer.completion(row["chosen"]), tokenizer.completion(row["rejected"]))
        for completion in both:
            columns.add(prompt, completion)
    index = torch.arange(len(columns.prompts))
    refuse_empty(path, columns, (index // 2 + 1).tolist())
    return Rows(columns=columns.batch(pair_id=index // 2, is_chosen=index % 2 == 0), rows_per_item=2)
