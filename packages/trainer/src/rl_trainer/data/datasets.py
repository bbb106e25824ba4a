"""Reading prompts from files and from procedural tasks into one row format.

A row is a JSON-able mapping: `prompt` (chat messages), `data_source`, `reward_model` ({"style": "rule",
"ground_truth": ...}), `extra_info`, optionally `agent_name`. Every row is checked here, before anything is started.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rl_trainer.config import DataConfig

Row = dict[str, Any]

_GSM8K_ANSWER = re.compile(r"####\s*(\S.*)\s*$")
GSM8K_INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """Training and held-out rows."""

    train: list[Row]
    """Rows to learn from."""
    eval: list[Row]
    """Rows that are never trained on."""


def load_datasets(config: DataConfig, *, seed: int) -> Datasets:
    """Read both datasets.

    Raises:
        DataError: a file is missing, or a row lacks a field (names the file and the row number, from 1).
    """
    if config.format == "reasoning_gym":
        return _reasoning_gym(config, seed)
    if config.path is None:
        raise DataError(
            f"data.format={config.format} needs data.path: a .jsonl or .parquet file, or a folder with train.* and "
            "test.*"
        )
    train_path, eval_path = _files(Path(config.path), config.eval_path)
    train = _read_rows(train_path, config)
    if eval_path is not None:
        return Datasets(train=train, eval=_read_rows(eval_path, config)[: config.eval_size])
    if len(train) <= config.eval_size:
        raise DataError(
            f"{train_path} has {len(train)} rows, too few to hold out data.eval_size={config.eval_size} of them; "
            "lower it or give data.eval_path"
        )
    return Datasets(train=train[: -config.eval_size], eval=train[-config.eval_size :])


def _files(path: Path, eval_path: str | None) -> tuple[Path, Path | None]:
    found_eval = Path(eval_path) if eval_path is not None else None
    if path.is_dir():
        train = _one_of(path, "train")
        if train is None:
            raise DataError(f"{path} has no train.jsonl or train.parquet")
        path, found_eval = train, found_eval or _one_of(path, "test")
    for file in filter(None, (path, found_eval)):
        if not file.is_file():
            raise DataError(f"there is no file {file}")
    return path, found_eval


def _one_of(folder: Path, stem: str) -> Path | None:
    return next((p for s in (".jsonl", ".parquet") if (p := folder / f"{stem}{s}").is_file()), None)


def _read_rows(path: Path, config: DataConfig) -> list[Row]:
    to_row = _from_gsm8k if config.format == "gsm8k" else _checked
    return [to_row(row, f"{path}, row {number}", config) for number, row in enumerate(_records(path), start=1)]


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise DataError(f"reading {path} needs pyarrow: pip install 'rl-post-trainer[parquet]'") from error
        yield from parquet.read_table(path).to_pylist()
        return
    if path.suffix != ".jsonl":
        raise DataError(f"{path} is neither .jsonl nor .parquet")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, row {number} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}, row {number} is not a JSON object")
            yield record


def _checked(row: Mapping[str, Any], where: str, _: DataConfig) -> Row:
    for name in ("prompt", "data_source", "reward_model"):
        if name not in row:
            raise DataError(f"{where} has no field {name!r}; a row needs prompt, data_source and reward_model")
    messages = row["prompt"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    ):
        raise DataError(
            f"{where}: 'prompt' must be a non-empty list of messages with role and content, got {messages!r:.80}"
        )
    if not isinstance(row["reward_model"], dict) or "ground_truth" not in row["reward_model"]:
        raise DataError(
            f"{where}: 'reward_model' must be an object with 'ground_truth', got {row['reward_model']!r:.80}"
        )
    return dict(row)


def _from_gsm8k(record: Mapping[str, Any], where: str, config: DataConfig) -> Row:
    for name in ("question", "answer"):
        if not isinstance(record.get(name), str):
            raise DataError(f"{where} has no text field {name!r}; gsm8k rows have question and answer")
    found = _GSM8K_ANSWER.search(record["answer"])
    if found is None:
        raise DataError(f"{where}: the answer has no line '#### <number>'")
    question = config.prompt_template.format(question=record["question"])
    return {
        "prompt": [{"role": "user", "content": f"{question}\n{GSM8K_INSTRUCTION}"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {},
    }


def _reasoning_gym(config: DataConfig, seed: int) -> Datasets:
    """Every problem once; held-out ones come from another seed, and none of them is trained on."""
    held_out = list(_unique(_draw(config, config.eval_size * 4, seed=10_000 + seed)).values())[: config.eval_size]
    if len(held_out) < config.eval_size:
        raise DataError(
            f"reasoning_gym task {config.task!r} gave only {len(held_out)} different problems "
            f"for data.eval_size={config.eval_size}; widen task_config"
        )
    train = _unique(_draw(config, config.num_rows, seed=seed))
    for row in held_out:
        train.pop(_question(row), None)
    return Datasets(train=list(train.values()), eval=held_out)


def _unique(rows: Iterable[Row]) -> dict[str, Row]:
    return {_question(row): row for row in rows}


def _question(row: Row) -> str:
    return row["prompt"][-1]["content"]


def _draw(config: DataConfig, size: int, *, seed: int) -> Iterator[Row]:
    reasoning_gym = import_reasoning_gym()
    try:
        dataset = reasoning_gym.create_dataset(config.task, size=size, seed=seed, **config.task_config)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"reasoning_gym cannot make task {config.task!r} with {dict(config.task_config)}: {error}"
        ) from error
    for entry in dataset:
        fields = {**entry["metadata"], "question": entry["question"]}
        try:
            content = config.prompt_template.format(**fields)
        except KeyError as error:
            raise DataError(
                f"data.prompt_template names {error}, but task {config.task!r} has {sorted(fields)}"
            ) from error
        yield {
            "prompt": [{"role": "user", "content": content}],
            "data_source": f"reasoning_gym/{config.task}",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {},
        }


def import_reasoning_gym() -> Any:
    """The reasoning_gym package, or the pip line."""
    try:
        with (
            warnings.catch_warnings()
        ):  # cellpylib, one of its dependencies, compares with `is`; goes when that is mended
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise DataError("reasoning_gym tasks need their package: pip install 'rl-post-trainer[quickstart]'") from error
    return reasoning_gym
