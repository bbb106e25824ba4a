"""The keys of `data.options`: what one source of rows reads and the others do not."""

from __future__ import annotations

import difflib
from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from rl_trainer.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from rl_trainer.config import DataConfig

Positive = Annotated[int, Field(gt=0)]
RECORDS = ("rows", "gsm8k")
"""Formats of records in files, or of the datasets package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Of `data.format=rows` and `gsm8k`."""

    prompt_template: str = "{question}"
    """How a prompt is made of `{question}`; gsm8k only."""
    stream_buffer: Positive | None = None
    """Read rows as they are needed, shuffled within so many, for what does not fit into memory; None reads them all."""
    train_split: str = "train"
    """Split to train on, of a dataset of the datasets package."""
    eval_split: str = "test"
    """Split of such a dataset that is held out."""
    load_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `datasets.load_dataset`, such as {name: main}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymOptions:
    """Of `data.format=reasoning_gym`."""

    task: str = "chain_sum"
    """Name of the task."""
    task_config: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters."""
    num_rows: Positive = 50000
    """Problems to draw."""
    prompt_template: str = "{question}"
    """How a prompt is made of `{question}` and the task's metadata."""


def record_options(config: DataConfig) -> RecordOptions:
    """Options of files and of datasets of the datasets package.

    Raises:
        ConfigError: an unknown key (names the nearest), or a value of the wrong type.
    """
    _reject_unknown(config, RecordOptions)
    return _parsed(TypeAdapter(RecordOptions), config)


def reasoning_gym_options(config: DataConfig) -> ReasoningGymOptions:
    """Options of procedural problems; raises as `record_options`."""
    _reject_unknown(config, ReasoningGymOptions)
    return _parsed(TypeAdapter(ReasoningGymOptions), config)


def check_options(config: DataConfig, *, uses_datasets: bool) -> None:
    """Check the options of the built-in formats; those of others are theirs to check.

    Args:
        config: Of the data.
        uses_datasets: Whether some rows come by the datasets package.

    Raises:
        ConfigError: as `record_options`.
        PlanError: an option would do nothing.
    """
    for name, part in config.mixture.items():
        own = replace(config, format=part.format or config.format, options=part.options or {})
        if "stream_buffer" in own.options:
            raise PlanError(
                f"data.mixture.{name}.options.stream_buffer does nothing: a mixture draws from rows it has read"
            )
        if own.format == "reasoning_gym":
            raise PlanError(f"data.mixture.{name}.format=reasoning_gym has no path, which every part of a mixture has")
        if own.format in RECORDS:
            record_options(own)
    if config.format == "reasoning_gym":
        reasoning_gym_options(config)
    if config.format not in RECORDS:
        return
    record_options(config)
    unless = {"stream_buffer": (not config.mixture, "beside data.mixture, which draws from rows that it has read")}
    unless["prompt_template"] = (config.format != "rows" or bool(config.mixture), "with data.format=rows")
    for name in ("train_split", "eval_split", "load_options"):
        unless[name] = (uses_datasets, "unless data.path is of the datasets package")
    for name, (is_used, why) in unless.items():
        if name in config.options and not is_used:
            raise PlanError(f"data.options.{name}={config.options[name]!r} does nothing {why}; leave it out")


def _reject_unknown(config: DataConfig, cls: type) -> None:
    known = [f.name for f in fields(cls)]
    for key in config.options:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"data.options.{key} is no option of data.format={config.format}; the nearest one is {near}"
            )


def _parsed(adapter: TypeAdapter[Any], config: DataConfig) -> Any:
    try:
        return adapter.validate_python(dict(config.options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"data.options.{where}: {first['msg']}, got {first['input']!r}") from error
