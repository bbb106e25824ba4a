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
import torch.distributed as dist

from rl_engine import _training
from rl_engine._data import ChatTokenizer, Columns, read_rows, refuse_empty
from rl_engine._rows import RowBatch
from rl_engine._training import Rows, RunConfig, RunReport
from rl_engine.errors import ConfigError
from rl_engine.losses import DpoKind, DpoLoss
from rl_engine.worker import TrainingWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHAPES = (("prompt", "chosen", "rejected"), ("prompt_token_ids", "chosen_token_ids", "rejected_token_ids"))
_SCORED_AT_ONCE = 1024  # rows of one forward call for the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(RunConfig):
    """One run of preference optimisation. `batch_size` counts pairs."""

    batch_size: int = 32
    """Pairs per step, over all ranks."""
    lr: float = 1e-6
    """Peak learning rate."""
    loss: DpoKind = DpoKind.SIGMOID
    """How the margin becomes a loss."""
    beta: float = 0.1
    """Weight of staying near the reference."""
    label_smoothing: float = 0.0
    """Probability that a label is the wrong way round; sigmoid only."""
    reference_free: bool = False
    """Leave the reference out."""


def train(config: DpoConfig, report: Callable[[str], None] = print) -> RunReport:
    """Train and write `output_dir`. Every rank calls it; rank 0 reports.

    Raises:
        ConfigError: a number is out of range.
        DataError: a data file is missing, or one of its rows cannot be used.
        ModelFolderError: the model folder cannot be loaded.
        NonFiniteError: a gradient is NaN or infinite.
    """
    started = time.perf_counter()
    _training.check(config)
    if config.beta <= 0 or not 0 <= config.label_smoothing < 0.5:
        raise ConfigError(
            f"beta is {config.beta} and label_smoothing {config.label_smoothing}; "
            "beta must be above 0, label_smoothing in [0, 0.5)."
        )
    if config.label_smoothing and config.loss != DpoKind.SIGMOID:
        raise ConfigError(f"label_smoothing does nothing with loss={config.loss}; leave it out.")
    data = tokenize_pairs(config.data_path, config.model_path)
    held_out = None if config.eval_path is None else tokenize_pairs(config.eval_path, config.model_path)
    loss = DpoLoss(
        kind=config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        is_reference_free=config.reference_free,
    )
    with TrainingWorker(_training.engine_config(config), config.backend) as worker:
        if not config.reference_free:
            for rows in (data, held_out):
                if rows is not None:
                    _add_reference(worker, rows)
        return _training.run(config, worker, loss, data, held_out, report, started)


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
    refuse_empty(path, columns, rows_per_item=2)
    index = torch.arange(len(columns.prompts))
    return Rows(columns=columns.batch(pair_id=index // 2, is_chosen=index % 2 == 0), rows_per_item=2)


def _add_reference(worker: TrainingWorker, rows: Rows) -> None:
    """Adds `ref_logprobs`, the log-probs of the weights as they are now; every rank scores its share."""
    rank, size = _training.rank_and_size()
    source = RowBatch(rows.columns, needs_mask=False, device=torch.device("cpu"))
    found: dict[int, torch.Tensor] = {}
    for start in range(0, source.num_rows, _SCORED_AT_ONCE * size):
        mine = list(range(start, min(start + _SCORED_AT_ONCE * size, source.num_rows)))[rank::size]
        scored = worker.forward(source.select(mine)).columns.get("logprobs")
        found |= dict(zip(mine, scored.unbind(), strict=True))
    shares: list[dict[int, torch.Tensor]] = [found] * size
    if size > 1:
        dist.all_gather_object(shares, found)
    whole = {row: values for share in shares for row, values in share.items()}
    values = torch.cat([whole[row] for row in range(source.num_rows)])
    rows.columns["ref_logprobs"] = torch.nested.nested_tensor_from_jagged(values, source.completion_offsets)
