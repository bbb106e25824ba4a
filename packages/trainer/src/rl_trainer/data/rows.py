"""Rows of data: their fields, and how a record of a file becomes one.

A row is a JSON-able mapping: `prompt` (chat messages, or text), optionally `answer`, `data_source`, `reward_model`
({"style": "rule", "ground_truth": ...}), `extra_info`, `agent_name`, `images` and `videos`. Every row is checked
before it is used.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast
from uuid import UUID

from pydantic import Field, TypeAdapter, ValidationError

from rl_agent.types import readable
from rl_trainer.errors import ConfigError, DataError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_trainer.config.schema import DataConfig

Row = dict[str, Any]
T = TypeVar("T")

_GSM8K_ANSWER = re.compile(r"####\s*(\S.*)\s*$")
GSM8K_INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."


def row_maker(config: DataConfig) -> Callable[[Mapping[str, Any], str], Row]:
    """Function from a record and its location, for messages, to a row.

    Raises (when called):
        DataError: the record lacks a field, or holds what no part can use.
    """
    options = record_options(config)
    if config.format == "gsm8k":
        return lambda record, where: _from_gsm8k(plain(record, where), where, options.prompt_template)
    return lambda record, where: checked(completed(renamed(record, options.columns, where)), where)


def plain(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Record as values that JSON has, and bytes; texts without lone surrogates.

    Dates and times become ISO 8601 texts, durations seconds, UUIDs texts, numpy's arrays and scalars Python's, missing
    values of pandas null; decimals become numbers, or texts where a number would round them.

    Raises:
        DataError: a field holds something else, or two have one name; names the type or the field.
    """
    made: dict[str, Any] = {}
    for name, value in record.items():
        if (text := readable(str(name))) in made:
            raise DataError(f"{where} has two fields {text!r}; rename one of them")
        try:
            made[text] = _plain(value)
        except RecursionError as error:
            raise DataError(
                f"{where}: field {name!r} is nested more than {_DEEPEST} levels deep; flatten it, or hold it as text"
            ) from error
        except TypeError as error:
            raise DataError(
                f"{where}: field {name!r} holds {error}, which JSON has no value for; convert it, or leave it out"
            ) from error
        except ValueError as error:
            raise DataError(f"{where}: field {name!r} has {error}; rename one of them") from error
    return made


CHATS = ("prompt", "messages", "completion", "chosen", "rejected", "tools")
"""Fields that hold chats, and tools."""


def without_filled(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Record of a table without the nulls in chats and tools that Arrow fills in: fields that other rows have."""
    chats = {*CHATS, *(theirs for ours, theirs in columns.items() if ours in CHATS)}
    return {name: without_nulls(value) if name in chats else value for name, value in record.items()}


def without_nulls(value: Any) -> Any:
    """Drop fields without a value, at any depth; a message's `content` stays, which may be null next to tool calls."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {
            name: without_nulls(each)
            for name, each in fields.items()
            if each is not None or (name == "content" and "role" in fields)
        }
    if isinstance(value, list):
        return [without_nulls(each) for each in cast("list[Any]", value)]
    return value


_DEEPEST = 100
"""Levels of a field's value. Every process that a row passes through, and the formats between them, take more."""


def _plain(value: Any, level: int = 0) -> Any:
    """Raises TypeError (a type has no JSON value), RecursionError (too deep), ValueError (names are equal as texts)."""
    if level > _DEEPEST:
        raise RecursionError
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, level)
    if hasattr(value, "tolist"):
        return _plain(_list_of(value), level)
    if type(value).__name__ in _MISSING and type(value).__module__.startswith("pandas."):
        return None
    if isinstance(value, str):
        return readable(str(value))
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        made = {str(_plain(name)): _plain(each, level + 1) for name, each in fields.items()}
        if len(made) < len(fields):
            raise ValueError(f"names that are equal as texts: {', '.join(map(repr, fields)):.80}")
        return made
    if isinstance(value, list | tuple):
        return [_plain(each, level + 1) for each in cast("list[Any]", value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


_MISSING = ("NAType", "NaTType")
_MOST_DIGITS = 300
"""Digits of a whole number; a longer one stays text."""


def _list_of(value: Any) -> Any:
    """Python's value of numpy's; its times have none in nanoseconds, and become texts and seconds."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind == "m":
        return (value / value.dtype.type(1, "s")).tolist()
    if kind != "M":
        return value.tolist()
    texts = value.astype(str).tolist()
    return [_without_nat(text) for text in texts] if isinstance(texts, list) else _without_nat(texts)


def _without_nat(text: Any) -> Any:
    return None if text == "NaT" else text


def _number(value: Decimal) -> int | float | str:
    """Number of a decimal; its text where a float would round it."""
    if value.is_finite() and value.adjusted() < _MOST_DIGITS and value == value.to_integral_value():
        return int(value)
    number = float(value)
    return number if value.is_nan() or Decimal(repr(number)) == value else str(value)


OWN = "rows"
"""`data_source` of rows that name none."""


def renamed(record: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Mapping[str, Any]:
    """Add a record's fields under our names, by `data.options.columns`.

    Raises:
        DataError: it has no such field (names those that it has).
    """
    for ours, theirs in columns.items():
        if theirs not in record:
            raise DataError(
                f"{where} has no field {theirs!r}, which data.options.columns.{ours} names; it has {', '.join(record)}"
            )
    return {**record, **{ours: record[theirs] for ours, theirs in columns.items()}}


TEXT_PROMPT = "is_text_prompt"
"""Field that marks a row whose prompt was a text: TRL's standard format, whose functions get completions as texts."""


def completed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a row's short form: a text as prompt is one message, `answer` is the ground truth of rules."""
    prompt = record.get("prompt")
    defaults: dict[str, Any] = {"data_source": OWN}
    defaults["reward_model"] = {"style": "rule", "ground_truth": record.get("answer")}
    if isinstance(prompt, str):
        return {**defaults, **record, "prompt": [{"role": "user", "content": prompt}], TEXT_PROMPT: True}
    return {**defaults, **record}


def checked(record: Mapping[str, Any], where: str) -> Row:
    """Check that a record is a row, and return it with plain values.

    Raises:
        DataError: it is not.
    """
    record = plain(record, where)
    for name in ("prompt", "data_source", "reward_model"):
        if name not in record:
            have = ", ".join(str(each) for each in record if each not in ("data_source", "reward_model"))
            raise DataError(
                f"{where} has no field {name!r}, but {have}; data.options.columns={{{name}: NAME}} says which it is"
            )
    messages = record["prompt"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    ):
        raise DataError(
            f"{where}: 'prompt' must be a non-empty list of messages with role and content, got {messages!r:.80}"
        )
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        if not (isinstance(content, str | list) or (content is None and message.get("tool_calls"))):
            raise DataError(
                f"{where}: message {number} of 'prompt' has content {content!r:.80}; give text, or a list of parts"
            )
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        raise DataError(
            f"{where}: 'prompt' ends with a message of the assistant, so the model would answer its own answer; leave "
            "that message out"
        )
    if not isinstance(record["reward_model"], dict) or "ground_truth" not in record["reward_model"]:
        raise DataError(
            f"{where}: 'reward_model' must be an object with 'ground_truth', got {record['reward_model']!r:.80}"
        )
    return record


def shows_images(row: Row) -> bool:
    """Whether the prompt has images, videos or sounds."""
    return _has_parts(row, ("image", "image_url", "video", "video_url")) or has_sounds(row)


def shows_videos(row: Row) -> bool:
    """Whether the prompt has videos."""
    return _has_parts(row, ("video", "video_url"))


def has_sounds(row: Row) -> bool:
    """Whether the prompt has sounds."""
    return _has_parts(row, ("audio", "audio_url", "input_audio"))


def _has_parts(row: Row, kinds: tuple[str, ...]) -> bool:
    parts = (part for message in row["prompt"] if isinstance(message["content"], list) for part in message["content"])
    return any(part.get("type", "text") in kinds for part in parts if isinstance(part, dict))


def _from_gsm8k(record: Mapping[str, Any], where: str, template: str) -> Row:
    for name in ("question", "answer"):
        if not isinstance(record.get(name), str):
            raise DataError(f"{where} has no text field {name!r}; gsm8k rows have question and answer")
    found = _GSM8K_ANSWER.search(record["answer"])
    if found is None:
        raise DataError(f"{where}: the answer has no line '#### <number>'")
    question = template.format(question=record["question"])
    return {
        "prompt": [{"role": "user", "content": f"{question}\n{GSM8K_INSTRUCTION}"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {},
    }


Positive = Annotated[int, Field(gt=0)]
RECORDS = ("rows", "gsm8k")
"""Formats of records in files, or of the datasets package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Options of `data.format=rows` and `gsm8k`."""

    prompt_template: str = "{question}"
    """Template of a prompt, with `{question}`; gsm8k only."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of the file's fields by ours, such as {prompt: question, answer: solution}; rows only."""
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
    """Options of `data.format=reasoning_gym`."""

    task: str = "chain_sum"
    """Name of the task."""
    task_config: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task."""
    num_rows: Positive = 50000
    """Problems to draw."""
    prompt_template: str = "{question}"
    """Template of a prompt, with `{question}` and the task's metadata."""


def record_options(config: DataConfig) -> RecordOptions:
    """Options of files and of datasets of the datasets package.

    Raises:
        ConfigError: an unknown key (names the nearest), or a value of the wrong type.
    """
    return _options(config, RecordOptions)


def reasoning_gym_options(config: DataConfig) -> ReasoningGymOptions:
    """Options of procedural problems; raises as `record_options`."""
    return _options(config, ReasoningGymOptions)


def _options(config: DataConfig, cls: type[T]) -> T:
    known = [f.name for f in fields(cast("Any", cls))]
    for key in config.options:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"data.options.{key} is not an option of data.format={config.format}; the nearest one is {near}"
            )
    try:
        return _validator(cls).validate_python(dict(config.options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"data.options.{where}: {first['msg']}, got {first['input']!r}") from error


@cache
def _validator(cls: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(cls)


def check_options(config: DataConfig, *, uses_datasets: bool) -> None:
    """Check the options of the built-in formats; those of others are theirs to check.

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
    unless = {"stream_buffer": (not config.mixture, "with data.mixture, which draws from rows that it has read")}
    unless["columns"] = (config.format == "rows", "with data.format=gsm8k, whose fields are question and answer")
    unless["prompt_template"] = (config.format != "rows" or bool(config.mixture), "with data.format=rows")
    for name in ("train_split", "eval_split", "load_options"):
        unless[name] = (uses_datasets, "unless data.path is of the datasets package")
    for name, (is_used, why) in unless.items():
        if name in config.options and not is_used:
            raise PlanError(f"data.options.{name}={config.options[name]!r} does nothing {why}; leave it out")
