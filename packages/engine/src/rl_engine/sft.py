"""Supervised fine-tuning on prompt-completion pairs, with nothing but an engine.

A data row is `{"prompt": [chat messages], "completion": "text"}`, or has `prompt_token_ids` and
`completion_token_ids`. The loss is the token negative log-likelihood of the completions. Packing, data parallelism
(start with torchrun) and accumulation are the engine's business.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from rl_engine._registry import create_engine
from rl_engine._rows import RowBatch
from rl_engine.errors import ConfigError, DataError
from rl_engine.losses import sft_loss
from rl_engine.types import EngineConfig, MatmulPrecision, ModelInit, OptimizerConfig, Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_engine.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """One run of supervised fine-tuning."""

    model_path: str
    """A Hugging Face model folder with a tokenizer."""
    data_path: str
    """A JSONL file."""
    output_dir: str
    """Where the trained model folder is written."""
    steps: int = 300
    """Optimizer steps."""
    batch_size: int = 256
    """Rows per step, over all ranks."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps of linear warm-up; the rate then falls along a cosine to a tenth of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to this."""
    max_tokens_per_gpu: int = 8192
    """Tokens of one micro-batch."""
    init: ModelInit = ModelInit.PRETRAINED
    """random: start from new weights; the folder then needs only config and tokenizer."""
    precision: Precision = Precision.FLOAT32
    """Of parameters and activations."""
    matmul_precision: MatmulPrecision = MatmulPrecision.MEDIUM
    """Of matrix products inside float32."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass."""
    seed: int = 0
    """Of initialisation, dropout and the order of rows."""
    target_loss: float | None = None
    """Stop once the mean loss of the last `log_every` steps is at or below it."""
    target_sequence_accuracy: float | None = None
    """Stop once the mean sequence accuracy of the last `log_every` steps is at or above it, each measured on a batch
    before it is learned from."""
    log_every: int = 20
    """Steps between two progress lines."""
    backend: str = "fsdp"
    """Engine backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    """What a run came to."""

    steps: int
    """Optimizer steps taken."""
    loss: float
    """Mean over the last `log_every` steps, nats per completion token."""
    accuracy: float
    """The same mean of `sft_loss`'s accuracy."""
    sequence_accuracy: float
    """And of its sequence accuracy."""
    num_rows: int
    """Rows in the data file."""
    tokens: int
    """Prompt and completion tokens seen, over all ranks."""
    wall_s: float
    """Seconds, loading and saving included."""


def train(config: SftConfig, report: Callable[[str], None] = print) -> SftReport:
    """Train and write `output_dir`. Every rank calls it; rank 0 reports.

    Args:
        config: What to do.
        report: Takes one progress line at a time.

    Raises:
        ConfigError: a number is out of range.
        DataError: the data file is missing, or one of its rows cannot be used.
        ModelFolderError: the model folder cannot be loaded.
        NonFiniteError: a gradient is NaN or infinite.
    """
    started = time.perf_counter()
    _check(config)
    data = tokenize_file(config.data_path, config.model_path)
    engine = create_engine(config.backend, _engine_config(config))
    engine.initialize()
    try:
        outcome = _run(config, engine, data, report, started)
        engine.save_model(config.output_dir)
    finally:
        engine.close()
    return outcome


def tokenize_file(path: str | Path, model_path: str | Path) -> TensorDict:
    """Read a JSONL file into the jagged columns that an engine takes, every completion token with loss_mask 1.

    Raises:
        DataError: names the row (from 1) and what is wrong with it.
    """
    rows = _read(Path(path))
    spoken = [index for index, row in enumerate(rows) if "prompt_token_ids" not in row]
    prompts = [row.get("prompt_token_ids") for row in rows]
    completions = [row.get("completion_token_ids") for row in rows]
    if spoken:
        texts = _tokenize([rows[index] for index in spoken], model_path)
        for index, (prompt, completion) in zip(spoken, texts, strict=True):
            prompts[index], completions[index] = prompt, completion
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), start=1):
        if not prompt or not completion:
            raise DataError(f"{path}: row {number} needs at least one prompt token and one completion token.")
    return TensorDict(
        {
            "prompt_token_ids": _jagged(prompts),
            "completion_token_ids": _jagged(completions),
            "loss_mask": _jagged([[1] * len(ids or ()) for ids in completions]),
        },
        batch_size=[len(rows)],
    )  # fmt: skip


def _check(config: SftConfig) -> None:
    for name in ("steps", "batch_size", "max_tokens_per_gpu", "log_every"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1.")
    if Path(config.output_dir).is_file():
        raise ConfigError(f"output_dir {config.output_dir} is a file; give a folder.")


def _engine_config(config: SftConfig) -> EngineConfig:
    return EngineConfig(
        model_path=config.model_path,
        init=config.init,
        optimizer=OptimizerConfig(
            lr=config.lr,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            warmup_steps=min(config.warmup_steps, config.steps // 2),
            total_steps=config.steps,
            min_lr_ratio=0.1,
        ),
        precision=config.precision,
        matmul_precision=config.matmul_precision,
        max_tokens_per_gpu=config.max_tokens_per_gpu,
        activation_checkpointing=config.activation_checkpointing,
        seed=config.seed,
    )


def _run(
    config: SftConfig, engine: Engine, data: TensorDict, report: Callable[[str], None], started: float
) -> SftReport:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    source = RowBatch(data, needs_mask=True, device=torch.device("cpu"))
    lengths = torch.tensor(source.lengths)
    recent: deque[dict[str, float]] = deque(maxlen=config.log_every)
    tokens = step = 0
    means = dict.fromkeys(("loss", "accuracy", "sequence_accuracy"), float("nan"))
    with engine.train_mode():
        for step, rows in enumerate(batches(source.num_rows, config.batch_size, config.seed, config.steps), start=1):
            engine.optimizer_zero_grad()
            recent.append(engine.forward_backward_batch(source.select(rows[rank::size]), sft_loss).metrics)
            norm = engine.optimizer_step()
            rate = engine.lr_scheduler_step()
            tokens += int(lengths[rows].sum())
            means = {name: fmean(entry[name] for entry in recent) for name in means}
            is_done = len(recent) == config.log_every and _is_reached(config, means)
            if rank == 0 and (step % config.log_every == 0 or step == config.steps or is_done):
                speed = tokens / (time.perf_counter() - started)
                report(
                    f"step {step}/{config.steps}  loss {means['loss']:.4f}  accuracy {means['accuracy']:.3f}  "
                    f"of sequences {means['sequence_accuracy']:.3f}  grad norm {norm:.2f}  lr {rate:.2e}  "
                    f"{speed:.0f} tokens/s"
                )
            if is_done:
                break
    wall = time.perf_counter() - started
    return SftReport(steps=step, **means, num_rows=source.num_rows, tokens=tokens, wall_s=wall)


def _is_reached(config: SftConfig, means: Mapping[str, float]) -> bool:
    loss, accuracy = config.target_loss, config.target_sequence_accuracy
    return (loss is not None and means["loss"] <= loss) or (
        accuracy is not None and means["sequence_accuracy"] >= accuracy
    )


def batches(num_rows: int, batch_size: int, seed: int, steps: int) -> Iterator[list[int]]:
    """Row numbers of each step: every row once before any comes again, in an order drawn anew each time round."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    for _ in range(steps):
        while len(queue) < batch_size:
            queue += torch.randperm(num_rows, generator=generator).tolist()
        yield queue[:batch_size]
        del queue[:batch_size]


def _read(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise DataError(f"Data file {path} does not exist.")
    rows: list[Mapping[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {number} is not JSON: {error}.") from error
            rows.append(_checked(row, path, number))
    if not rows:
        raise DataError(f"Data file {path} has no rows.")
    return rows


def _checked(row: Any, path: Path, number: int) -> Mapping[str, Any]:
    pairs = (("prompt_token_ids", "completion_token_ids"), ("prompt", "completion"))
    if isinstance(row, dict):
        for first, second in pairs:
            if first in row and second in row:
                return row  # pyright: ignore[reportUnknownVariableType] - JSON
    fields = ", ".join(sorted(map(str, row))) if isinstance(row, dict) else type(row).__name__
    raise DataError(
        f"{path}: row {number} has {fields or 'nothing'}; wanted prompt and completion, "
        "or prompt_token_ids and completion_token_ids."
    )


def _tokenize(rows: Sequence[Mapping[str, Any]], model_path: str | Path) -> list[tuple[list[int], list[int]]]:
    """Prompts through the folder's chat template, completions as they are and ended by eos."""
    tokenizer = _tokenizer(model_path)
    try:
        texts = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:
        raise DataError(f"The chat template of {model_path} cannot render a prompt: {error}") from error
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    completions = tokenizer([row["completion"] for row in rows], add_special_tokens=False)["input_ids"]
    return [(prompt, [*ids, tokenizer.eos_token_id]) for prompt, ids in zip(prompts, completions, strict=True)]


def _tokenizer(model_path: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"Model folder {model_path} has no tokenizer that transformers can load; give one, or pre-tokenised rows."
        ) from error
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        lack = "chat template" if tokenizer.chat_template is None else "eos token"
        raise DataError(f"The tokenizer of {model_path} has no {lack}; add one, or give pre-tokenised rows.")
    return tokenizer


def _jagged(rows: Sequence[Sequence[int] | None]) -> torch.Tensor:
    lengths = torch.tensor([len(row or ()) for row in rows])
    values = torch.tensor([value for row in rows for value in row or ()], dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
