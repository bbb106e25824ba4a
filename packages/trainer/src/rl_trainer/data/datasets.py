"""The training and held-out rows of a run, from whatever `data` names."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.data.options import record_options
from rl_trainer.data.procedural import load_reasoning_gym
from rl_trainer.data.records import sources
from rl_trainer.data.rows import Row, checked, row_maker
from rl_trainer.data.stream import StreamedRows
from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_trainer.config import DataConfig

GROUP = "rl_trainer.datasets"
"""Entry points of `data.format`s: callables `(config: DataConfig, *, seed: int)` that give an object with `train` and
`eval`, sequences of rows."""
BUILT_IN = ("rows", "gsm8k", "reasoning_gym")
PART = "mixture"
"""The field of a row that says which part of `data.mixture` it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """Training and held-out rows."""

    train: Sequence[Row]
    """Rows to learn from; empty where they are streamed."""
    eval: list[Row]
    """Rows that are never trained on."""
    stream: StreamedRows | None = None
    """Rows to learn from that are read as they are needed."""


def load_datasets(config: DataConfig, *, seed: int) -> Datasets:
    """Read both datasets; of a stream only the held-out one.

    Raises:
        DataError: a file is missing, or a row lacks a field (names the file and the row number, from 1).
    """
    if config.mixture:
        return _mixture(config, seed)
    if config.format == "reasoning_gym":
        train, held_out = load_reasoning_gym(config, seed)
        return Datasets(train=train, eval=held_out)
    if config.format not in BUILT_IN:
        return _custom(config, seed)
    train_source, eval_source = sources(config)
    make = row_maker(config)
    held_out: list[Row] = []
    if eval_source is not None:
        held_out = [make(r.read(), r.where) for r in itertools.islice(eval_source.records(), config.eval_size)]
    buffer_size = record_options(config).stream_buffer
    if buffer_size is not None:
        if eval_source is None:
            raise DataError(
                f"data.options.stream_buffer={buffer_size} cannot hold out the last rows of {train_source.name}, which "
                "a stream has not read; give data.eval_path, or a folder or dataset with a part for tests"
            )
        stream = StreamedRows(train_source, make, seed=seed, buffer_size=buffer_size)
        return Datasets(train=[], eval=held_out, stream=stream)
    train = [make(record.read(), record.where) for record in train_source.records()]
    if eval_source is not None:
        return Datasets(train=train, eval=held_out)
    if len(train) <= config.eval_size:
        raise DataError(
            f"{train_source.name} has {len(train)} rows, too few to hold out data.eval_size={config.eval_size} of "
            "them; lower it or give data.eval_path"
        )
    return Datasets(train=train[: -config.eval_size], eval=train[-config.eval_size :])


def _mixture(config: DataConfig, seed: int) -> Datasets:
    """Every part's rows, each marked with the part's name; held-out rows in proportion to the weights."""
    total = sum(part.weight for part in config.mixture.values())
    train, held_out = list[Row](), list[Row]()
    for name, part in config.mixture.items():
        size = max(round(config.eval_size * part.weight / total), 1)
        options = config.options if part.options is None else part.options
        own = replace(
            config, mixture={}, path=part.path, format=part.format or config.format, options=options, eval_size=size
        )
        found = load_datasets(own, seed=seed)
        train += [{**row, PART: name} for row in found.train]
        held_out += [{**row, PART: name} for row in found.eval]
    return Datasets(train=train, eval=held_out)


def _custom(config: DataConfig, seed: int) -> Datasets:
    made = find_format(config.format)(config, seed=seed)
    for part in ("train", "eval"):
        if not getattr(made, part, None):
            raise DataError(f"data.format={config.format} gave no rows as {part!r}; it must give both train and eval")
    train, held_out = (
        [checked(row, f"data.format={config.format}, {part} row {n}") for n, row in enumerate(getattr(made, part), 1)]
        for part in ("train", "eval")
    )
    return Datasets(train=train, eval=held_out[: config.eval_size])


def find_format(name: str) -> Any:
    """The callable of a `data.format` that is not built in: `FILE.py:NAME`, or an entry point.

    Raises:
        DataError: there is none.
    """
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise DataError(f"data.format={name}: there is no file {file}")
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None, "it is a .py file"
        assert spec.loader is not None, "it is a .py file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, attribute):
            raise DataError(f"data.format={name}: {file} defines no {attribute}")
        return getattr(module, attribute)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join([*BUILT_IN, *sorted(found)])
        raise DataError(f"data.format={name!r} is unknown; there are {known}, and FILE.py:NAME")
    return found[name].load()
