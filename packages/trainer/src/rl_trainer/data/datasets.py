"""The training and held-out rows of a run, from the source in `data`.

Datasets of the hub and saved ones are read by `datasets`. Local files and the shuffled stream are ours (measured with
datasets 5.2.0): a stream with a shuffle buffer of 100 that was stopped after 300 of 2,000 rows and resumed by
`state_dict` lost 63 rows and gave 13 twice, where a run promises each once; a field that some rows lack is None in
them; and its import takes 0.85 s of the time to the first reward.
"""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_agent.errors import AgentError
from rl_agent.registry import create_environments
from rl_trainer.config.schema import DataConfig
from rl_trainer.data.rows import (
    ReasoningGymOptions,
    Row,
    check_options,
    checked,
    completed,
    reasoning_gym_options,
    record_options,
    row_maker,
    without_filled,
)
from rl_trainer.errors import DataError, PlanError
from rl_trainer.plugins import named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rl_trainer.config.schema import AgentSection

GROUP = "rl_trainer.datasets"
"""Entry points of `data.format`s: callables `(config: DataConfig, *, seed: int)` that give an object with `train` and
`eval`, sequences of rows."""
BUILT_IN = ("rows", "gsm8k", "reasoning_gym")
_BUILT_IN: dict[str, Any] = dict.fromkeys(BUILT_IN)
PART = "mixture"
"""The field of a row that says which part of `data.mixture` it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """Datasets of a run: training and held-out rows."""

    train: Sequence[Row]
    """Rows to learn from; empty where they are streamed."""
    eval: list[Row]
    """Rows that are never trained on."""
    stream: StreamedRows | None = None
    """Rows to learn from that are read as they are needed."""
    num_bad: int = 0
    """Rows that were left out with `data.on_bad_row=drop`."""
    bad: tuple[str, ...] = ()
    """The first of them: file, number and reason."""
    numbers: tuple[Sequence[str], Sequence[str]] = ((), ())
    """File and number of each training and each held-out row; empty where they have none."""

    def where(self, index: int, *, is_eval: bool = False) -> str:
        """Location of a row, for messages."""
        numbers = self.numbers[is_eval]
        return numbers[index] if numbers else f"{'held-out' if is_eval else 'training'} row {index + 1}"


class LocatedRows(list[Row]):
    """Rows that know their locations."""

    def __init__(self, rows: Iterable[Row], places: Sequence[str]) -> None:
        super().__init__(rows)
        self._places = places

    def where(self, index: int) -> str:
        """Location of a row, for messages."""
        return self._places[index]


def location(rows: object, index: int, *, kind: str = "row") -> str:
    """Location of a row: its file and number, where the rows know them."""
    where: Callable[[int], str] | None = getattr(rows, "where", None)
    return f"{kind} {index + 1}" if where is None else where(index)


def load_datasets(config: DataConfig, *, seed: int, agent: AgentSection | None = None) -> Datasets:
    """Load training and held-out rows; of a stream only the held-out ones.

    `agent.environment` gives the rows where no other source is set.

    Raises:
        DataError: a file is missing, or a row lacks a field (names the file and the row number, from 1).
    """
    if config.mixture:
        return _mixture(config, seed)
    if agent is not None and agent.environment is not None and config.format in BUILT_IN and config.path is None:
        return _played(config, agent.environment, agent.options.get("environment_args"), seed)
    if config.format == "reasoning_gym":
        train, held_out = load_reasoning_gym(config, seed)
        return Datasets(train=train, eval=held_out)
    if config.format not in BUILT_IN:
        return _custom(config, seed)
    train_source, eval_source = sources(config)
    make, buffer_size = row_maker(config), record_options(config).stream_buffer
    complaints = Complaints(is_error=config.on_bad_row == "error")
    train, numbers, held_out, held, stream = list[Row](), list[str](), list[Row](), list[str](), None
    if eval_source is not None:
        held_out, held = _rows(itertools.islice(eval_source.records(), config.eval_size), make, complaints)
    if buffer_size is None:
        train, numbers = _rows(train_source.records(), make, complaints)
    elif eval_source is None:
        raise DataError(
            f"data.options.stream_buffer={buffer_size} cannot hold out the last rows of {train_source.name}, which a "
            "stream has not read; give data.eval_path, or a folder or dataset with a part for tests"
        )
    else:
        stream = StreamedRows(train_source, make, seed=seed, buffer_size=buffer_size)
    complaints.check(len(train) + len(held_out))
    if eval_source is None:
        if len(train) < 2:
            raise DataError(f"{train_source.name} has {len(train)} rows, too few to hold one out; give data.eval_path")
        size = min(config.eval_size, max(len(train) // 10, 1))
        train, held_out, numbers, held = train[:-size], train[-size:], numbers[:-size], numbers[-size:]
    return Datasets(train=train, eval=held_out, stream=stream, numbers=(numbers, held), **complaints.left_out())


class Complaints:
    """Rows that cannot be used: the first five, and how many there are."""

    most = 5

    def __init__(self, *, is_error: bool) -> None:
        self._is_error = is_error
        self.count, self.first, self.example = 0, list[str](), ""

    def add(self, sentence: str) -> None:
        """Add one, which names file and row."""
        self.count += 1
        if len(self.first) < self.most:
            self.first.append(sentence)

    def left_out(self) -> dict[str, Any]:
        """`num_bad` and `bad` of `Datasets`."""
        return {"num_bad": self.count, "bad": tuple(self.first)}

    def check(self, num_good: int, *, of_all: str = "") -> None:
        """Raise what was added, unless `data.on_bad_row=drop`.

        Raises:
            DataError: rows cannot be used; names five of them, and says how many there are.
        """
        if not self.count or not self._is_error:
            return
        if self.count == 1:
            raise DataError(f"{self.first[0]}{self.example}")
        more = f"; and {self.count - self.most} more" if self.count > self.most else ""
        raise DataError(
            f"{self.count} of {num_good + self.count} {of_all}rows cannot be used: {'; '.join(self.first)}{more}; fix "
            f"them, or leave them out with data.on_bad_row=drop{self.example}"
        )


def _rows(
    records: Iterable[Record], make: Callable[[Mapping[str, Any], str], Row], complaints: Complaints
) -> tuple[list[Row], list[str]]:
    """Rows of records and their locations, one each; those that are no row are added to the complaints."""
    rows, numbers = list[Row](), list[str]()
    for record in records:
        try:
            rows.append(make(record.read(), record.where))
            numbers.append(record.where)
        except DataError as error:
            complaints.example = complaints.example or _shown(record)
            complaints.add(str(error))
    return rows, numbers


def _shown(record: Record) -> str:
    try:
        return f". The first of them is {json.dumps(record.read(), default=str)[:300]}"
    except DataError:
        return ""  # it is no JSON, and said so


def check_data(data: DataConfig) -> None:
    """Check that every key of `data` does something with this source.

    Raises:
        ConfigError: as `record_options`.
        PlanError: one does nothing.
    """
    default = DataConfig()
    is_file = data.format in {"rows", "gsm8k"}
    is_streamed = is_file and data.options.get("stream_buffer") is not None
    is_dataset = is_file and data.path is not None and (data.path.startswith(HUB) or is_saved_dataset(data.path))

    def refuse(is_used: bool, why: str, *names: str) -> None:
        for name in names:
            if not is_used and getattr(data, name) != getattr(default, name):
                raise PlanError(f"data.{name}={getattr(data, name)!r} does nothing {why}; leave it out")

    with_format = f"with data.format={data.format}"
    refuse(data.format != "reasoning_gym", with_format, "path", "eval_path")
    refuse(is_file, with_format, "mixture")
    refuse(not data.mixture, "with data.mixture", "path", "eval_path")
    if data.curriculum is not None and (is_streamed or data.mixture):
        raise PlanError(
            "data.curriculum chooses among all rows of one dataset, so it goes with neither data.options.stream_buffer "
            "nor data.mixture; leave it out"
        )
    uses_datasets = is_dataset or any(
        part.path.startswith(HUB) or is_saved_dataset(part.path) for part in data.mixture.values()
    )
    refuse(not is_dataset, "with a dataset of the datasets package: set data.options.eval_split", "eval_path")
    check_options(data, uses_datasets=uses_datasets)


def _mixture(config: DataConfig, seed: int) -> Datasets:
    """Mixture: rows of every part, marked with its name; held-out rows in proportion to the weights."""
    total = sum(part.weight for part in config.mixture.values())
    train, held_out, numbers, held = list[Row](), list[Row](), list[str](), list[str]()
    num_bad, bad = 0, list[str]()
    for name, part in config.mixture.items():
        size = max(round(config.eval_size * part.weight / total), 1)
        options = config.options if part.options is None else part.options
        own = replace(
            config, mixture={}, path=part.path, format=part.format or config.format, options=options, eval_size=size
        )
        found = load_datasets(own, seed=seed)
        train += [{**row, PART: name} for row in found.train]
        held_out += [{**row, PART: name} for row in found.eval]
        numbers += [found.where(index) for index in range(len(found.train))]
        held += [found.where(index, is_eval=True) for index in range(len(found.eval))]
        num_bad, bad = num_bad + found.num_bad, [*bad, *found.bad]
    return Datasets(
        train=train, eval=held_out, numbers=(numbers, held), num_bad=num_bad, bad=tuple(bad[: Complaints.most])
    )


def _played(config: DataConfig, environment: str, arguments: Mapping[str, Any] | None, seed: int) -> Datasets:
    """Rows of `agent.environment`, which writes their prompts itself."""
    try:
        source = create_environments(environment, arguments)
        parts = source.rows(seed=seed, num_train=_EPISODES, num_eval=config.eval_size)
    except AgentError as error:
        raise DataError(f"agent.environment={environment} cannot be played: {error}") from error
    shown = {"prompt": f"what {environment} shows"}
    train, held_out = ([checked(completed(shown | row), environment) for row in rows] for rows in parts)
    if not train or not held_out:
        raise DataError(
            f"agent.environment={environment} has {len(train)} episodes for training and {len(held_out)} held out; at "
            "least one of each is needed"
        )
    if not source.is_endless:
        return Datasets(train=train, eval=held_out)
    episodes = Source(environment, lambda: _numbered(f"agent.environment={environment}", train))
    stream = StreamedRows(episodes, lambda record, _: dict(record), seed=seed, buffer_size=1)
    return Datasets(train=[], eval=held_out, stream=stream)


_EPISODES = 10_000
"""Training episodes of an environment that has any number."""


def _custom(config: DataConfig, seed: int) -> Datasets:
    make = named(config.format, _BUILT_IN, group=GROUP, kind=object, key="data.format")
    try:
        made = make(config, seed=seed)
    except AgentError as error:
        raise DataError(str(error)) from error
    for part in ("train", "eval"):
        if not getattr(made, part, None):
            raise DataError(f"data.format={config.format} gave no rows as {part!r}; it must give both train and eval")
    complaints = Complaints(is_error=config.on_bad_row == "error")
    (train, numbers), (held_out, held) = (
        _rows(_numbered(f"data.format={config.format}, {part}", getattr(made, part)), checked, complaints)
        for part in ("train", "eval")
    )
    complaints.check(len(train) + len(held_out))
    size = config.eval_size
    return Datasets(train=train, eval=held_out[:size], numbers=(numbers, held[:size]), **complaints.left_out())


HUB = "hf:"
"""Prefix of a `data.path` on the Hugging Face hub."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files that `Dataset.save_to_disk` leaves."""


class Record(NamedTuple):
    """Record of a source, read lazily: no further than needed to know where the next one begins."""

    where: str
    """File and number, for messages."""
    read: Callable[[], Mapping[str, Any]]
    """Gives its fields; raises DataError if there are none."""


class Source(NamedTuple):
    """Source of records, which can be iterated again and again."""

    name: str
    """Location for messages."""
    records: Callable[[], Iterator[Record]]
    """Begins anew."""


def sources(config: DataConfig) -> tuple[Source, Source | None]:
    """Sources of training and held-out records; the latter None if nothing is held out.

    Raises:
        DataError: a file is missing, or of no known kind, or a dataset cannot be loaded.
    """
    if config.path is None:
        raise DataError(
            f"data.format={config.format} needs data.path: a .jsonl or .parquet file, a folder with train.* and "
            f"test.*, or {HUB}NAME of a dataset"
        )
    if config.path.startswith(HUB) or is_saved_dataset(config.path):
        return _dataset_sources(config.path.removeprefix(HUB), config)
    train, held_out = _files(Path(config.path), config.eval_path)
    columns = record_options(config).columns
    return _file_source(train, columns), None if held_out is None else _file_source(held_out, columns)


def _files(path: Path, eval_path: str | None) -> tuple[Path, Path | None]:
    found_eval = Path(eval_path) if eval_path is not None else None
    if path.is_dir():
        train = _one_of(path, "train")
        if train is None:
            raise DataError(f"{path} has no train.jsonl or train.parquet")
        path, found_eval = train, found_eval or _one_of(path, "test")
    for file in filter(None, (path, found_eval)):
        if not file.is_file():
            raise DataError(f"there is no file {file}, which data.path or data.eval_path leads to")
    return path, found_eval


def _one_of(folder: Path, stem: str) -> Path | None:
    return next((p for s in (".jsonl", ".parquet") if (p := folder / f"{stem}{s}").is_file()), None)


def _file_source(path: Path, columns: Mapping[str, str]) -> Source:
    if path.suffix == ".parquet":
        if find_spec("pyarrow") is None:
            raise DataError(f"reading {path} needs pyarrow: pip install 'rl-post-trainer[parquet]'")
        return Source(str(path), lambda: _parquet(path, columns))
    if path.suffix != ".jsonl":
        raise DataError(f"{path} is neither .jsonl nor .parquet")
    return Source(str(path), lambda: _jsonl(path))


def _parquet(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = Counter(file.schema_arrow.names)
            if names and (twice := names.most_common(1)[0])[1] > 1:
                raise DataError(f"{path} has two columns {twice[0]!r}; rename one of them")
            rows: Iterator[Any] = (row for batch in file.iter_batches() for row in _rows_of(batch))
            yield from _numbered(str(path), rows, columns)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _numbered(name: str, rows: Iterable[Any], columns: Mapping[str, str] | None = None) -> Iterator[Record]:
    """Records of rows; with `columns`, of rows of an Arrow table."""
    for number, row in enumerate(rows, start=1):
        where = f"{name}, row {number}"
        yield Record(where, partial(_read, row, where, columns))


def _rows_of(batch: Any) -> list[Any]:
    """Rows of an Arrow batch; the error in place of one that Python has no value for, such as a date in year 10,000."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):
        if batch.num_rows > 1:
            return [row for index in range(batch.num_rows) for row in _rows_of(batch.slice(index, 1))]
        return [_refusal(batch)]


def _refusal(batch: Any) -> DataError:
    for name in batch.schema.names:
        try:
            batch.column(name).to_pylist()
        except (ValueError, OverflowError) as error:
            return DataError(
                f"field {name!r} has a value that Python cannot hold: {error}; convert it, or leave it out"
            )
    return DataError("it cannot be read")


def _read(row: Any, where: str, columns: Mapping[str, str] | None) -> Any:
    if isinstance(row, DataError):
        raise DataError(f"{where}: {row}") from row
    return row if columns is None else without_filled(row, columns)


def _jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, row {number}"
            yield Record(where, lambda line=line, where=where: _parsed(line, where))


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_object)
    except DataError as error:
        raise DataError(f"{where} {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object")
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises DataError for a name that an object has twice: which of the values is meant is not known."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise DataError(f"has the field {twice!r} twice; take one out")
    return made


def is_saved_dataset(path: str) -> bool:
    """Whether a folder was written by `save_to_disk` of the datasets package."""
    return any((Path(path) / name).is_file() for name in _SAVED)


def _dataset_sources(name: str, config: DataConfig) -> tuple[Source, Source | None]:
    options = record_options(config)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{HUB}{name} needs the datasets package: pip install 'rl-post-trainer[datasets]'") from error
    try:
        if is_saved_dataset(name):
            loaded = datasets.load_from_disk(name, **options.load_options)  # streams as it is: it is mapped, not read
        else:
            loaded = datasets.load_dataset(name, streaming=options.stream_buffer is not None, **options.load_options)
    except Exception as error:
        raise DataError(f"dataset {name!r} cannot be loaded with {dict(options.load_options)}: {error}") from error
    if not isinstance(loaded, dict):  # one split: nothing is set apart
        return Source(name, lambda: _numbered(name, _undecoded(loaded), options.columns)), None
    # "test" need not be there, for nobody asked for it: the last rows are held out instead.
    for split in (options.train_split, *({options.eval_split} - {"test"})):
        if split not in loaded:
            raise DataError(f"dataset {name!r} has no split {split!r}; it has {', '.join(loaded)}")
    train, held_out = (
        Source(
            f"{name}/{split}",
            lambda split=split: _numbered(f"{name}/{split}", _undecoded(loaded[split]), options.columns),
        )
        if split in loaded
        else None
        for split in (options.train_split, options.eval_split)
    )
    assert train is not None, "it was looked for"
    return train, held_out


def _undecoded(split: Any) -> Any:
    """Rows of a split whose images, sounds and videos are `{"bytes", "path"}` of files, as parquet has them."""
    import datasets

    def holds_media(feature: Any) -> bool:
        inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
        is_one = isinstance(feature, (datasets.Audio, datasets.Image, datasets.Video))
        return is_one or any(holds_media(each) for each in inner if each is not None)

    if not holds_media(dict(split.features or {})):
        return split
    return (row for table in split.with_format("arrow").iter(1) for row in _rows_of(table))


_NUM_PLACES = 65536
"""Rows of a stream whose locations are remembered."""


class StreamedRows:
    """Streamed rows: an endless sequence of epochs, each shuffled within a window that moves over the source.

    `rows[index]` reads on to that place. What lies before it is gone through without being parsed, from the beginning
    if the place has been passed; so a run that resumes costs one pass over what it had read of the epoch, not memory.

    A `buffer_size` of 1 keeps the order of the source.
    """

    def __init__(
        self, source: Source, make: Callable[[Mapping[str, Any], str], Row], *, seed: int, buffer_size: int
    ) -> None:
        self._source, self._make, self._seed, self._buffer_size = source, make, seed, buffer_size
        self.epoch_size: int | None = None
        """Records of the source; None until it has been read to its end."""
        self._places: dict[int, str] = {}
        self._restart(0, 0)

    def _restart(self, epoch: int, index: int) -> None:
        self._index = index
        self._records = self._from(epoch)

    def __getitem__(self, index: int) -> Row:
        """Row at an index.

        Raises:
            DataError: the record there is no row, or the source is empty.
        """
        if index < self._index:
            epoch = index // self.epoch_size if self.epoch_size else 0
            self._restart(epoch, epoch * (self.epoch_size or 0))
        record = next(itertools.islice(self._records, index - self._index, None))
        self._index = index + 1
        self._places[index] = record.where
        if len(self._places) > _NUM_PLACES:
            del self._places[next(iter(self._places))]
        return self._make(record.read(), record.where)

    def where(self, index: int) -> str:
        """Location of a row that was read lately, for messages."""
        return self._places.get(index, f"row {index + 1} of the stream")

    def _from(self, epoch: int) -> Iterator[Record]:
        while True:
            size = 0
            for record in self._shuffled(epoch):
                size += 1
                yield record
            if size == 0:
                raise DataError(f"{self._source.name} has no rows")
            self.epoch_size, epoch = size, epoch + 1

    def _shuffled(self, epoch: int) -> Iterator[Record]:
        draw = random.Random(f"{self._seed}/{epoch}")
        records = self._source.records()
        window = list(itertools.islice(records, self._buffer_size))
        for record in records:
            place = draw.randrange(len(window))
            yield window[place]
            window[place] = record
        draw.shuffle(window)
        yield from window


def load_reasoning_gym(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Load procedural problems: training and held-out rows without a common problem, from two seeds."""
    options = reasoning_gym_options(config)
    held_out = list(_unique(_draw(options, config.eval_size * 4, seed=10_000 + seed)).values())[: config.eval_size]
    if len(held_out) < config.eval_size:
        raise DataError(
            f"reasoning_gym task {options.task!r} gave only {len(held_out)} different problems "
            f"for data.eval_size={config.eval_size}; widen data.options.task_config"
        )
    train = _unique(_draw(options, options.num_rows, seed=seed))
    for row in held_out:
        train.pop(_question(row), None)
    return list(train.values()), held_out


def _unique(rows: Iterable[Row]) -> dict[str, Row]:
    return {_question(row): row for row in rows}


def _question(row: Row) -> str:
    return row["prompt"][-1]["content"]


def _draw(options: ReasoningGymOptions, size: int, *, seed: int) -> Iterator[Row]:
    reasoning_gym = import_reasoning_gym()
    try:
        dataset = reasoning_gym.create_dataset(options.task, size=size, seed=seed, **options.task_config)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"reasoning_gym cannot make task {options.task!r} with {dict(options.task_config)}: {error}"
        ) from error
    for entry in dataset:
        fields = {**entry["metadata"], "question": entry["question"]}
        try:
            content = options.prompt_template.format(**fields)
        except KeyError as error:
            raise DataError(
                f"data.options.prompt_template names {error}, but task {options.task!r} has {sorted(fields)}"
            ) from error
        yield {
            "prompt": [{"role": "user", "content": content}],
            "data_source": f"reasoning_gym/{options.task}",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {},
        }


def import_reasoning_gym() -> Any:
    """Import reasoning_gym, or raise an error with the pip line."""
    try:
        with (
            warnings.catch_warnings()
        ):  # cellpylib, one of its dependencies, compares with `is`; goes when that is fixed
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise DataError("reasoning_gym tasks need their package: pip install 'rl-post-trainer[quickstart]'") from error
    return reasoning_gym
