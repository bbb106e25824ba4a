"""Where records come from: JSONL and parquet files, folders of them, and what the `datasets` package loads."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_trainer.data.options import record_options
from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rl_trainer.config import DataConfig

HUB = "hf:"
"""What a `data.path` for the `datasets` package begins with."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files that `Dataset.save_to_disk` leaves."""


class Record(NamedTuple):
    """One record of a source, read no further than needed to know where the next one begins."""

    where: str
    """File and number, for messages."""
    read: Callable[[], Mapping[str, Any]]
    """Gives its fields; raises DataError if there are none."""


class Source(NamedTuple):
    """Records that can be gone through again and again."""

    name: str
    """For messages."""
    records: Callable[[], Iterator[Record]]
    """Begins anew."""


def sources(config: DataConfig) -> tuple[Source, Source | None]:
    """Where training and held-out records come from; None if nothing is set apart.

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
    return _file_source(train), None if held_out is None else _file_source(held_out)


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


def _file_source(path: Path) -> Source:
    if path.suffix == ".parquet":
        if find_spec("pyarrow") is None:
            raise DataError(f"reading {path} needs pyarrow: pip install 'rl-post-trainer[parquet]'")
        return Source(str(path), lambda: _parquet(path))
    if path.suffix != ".jsonl":
        raise DataError(f"{path} is neither .jsonl nor .parquet")
    return Source(str(path), lambda: _jsonl(path))


def _parquet(path: Path) -> Iterator[Record]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        rows: Iterator[Any] = (row for batch in file.iter_batches() for row in batch.to_pylist())
        yield from _numbered(str(path), rows)


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        yield Record(f"{name}, row {number}", partial(_same, row))


def _same(row: Any) -> Any:
    return row


def _jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, row {number}"
            yield Record(where, lambda line=line, where=where: _parsed(line, where))


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object")
    return record


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
        return Source(name, lambda: _numbered(name, loaded)), None
    # "test" need not be there, for nobody asked for it: the last rows are held out instead.
    for split in (options.train_split, *({options.eval_split} - {"test"})):
        if split not in loaded:
            raise DataError(f"dataset {name!r} has no split {split!r}; it has {', '.join(loaded)}")
    train, held_out = (
        Source(f"{name}/{split}", partial(_numbered, f"{name}/{split}", loaded[split])) if split in loaded else None
        for split in (options.train_split, options.eval_split)
    )
    assert train is not None, "it was looked for"
    return train, held_out
