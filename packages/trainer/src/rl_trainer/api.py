"""Python API: `train("quickstart")`, or with a custom model, data and functions, returns a `Run`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_trainer.config import load_config
from rl_trainer.config.load import flat
from rl_trainer.data.rows import completed, plain, without_filled
from rl_trainer.errors import ConfigError, DataError
from rl_trainer.output_dir import new_output_dir, write_whole
from rl_trainer.plugins import Serialized
from rl_trainer.run import run as run_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rich.console import Console

    from rl_trainer.config import Config
    from rl_trainer.metrics import StepRecord
    from rl_trainer.planning.prepare import Resume

_POLL_S = 0.2


def train(
    recipe: str = "gsm8k",
    *,
    model: str | Path | None = None,
    data: str | Path | Iterable[Mapping[str, Any]] | None = None,
    eval_data: Iterable[Mapping[str, Any]] | None = None,
    reward: Any = None,
    advantage: Any = None,
    loss: Any = None,
    output_dir: str | Path | None = None,
    resume: Resume = False,
    callback: Callable[[StepRecord], object] | None = None,
    wait: bool = True,
    console: Console | None = None,
    **overrides: Any,
) -> Run:
    """Train a policy as `rl-train` does, and return its run.

    Functions and classes travel to the workers by value, whatever file, notebook or function they were defined in.

    Args:
        recipe: A shipped one, or the path of a YAML file; the keys below stand above its own.
        model: Folder of the start policy (`model.path`).
        data: A path (`data.path`), or rows: an iterable of mappings, as a `datasets.Dataset` is. A row has `prompt`
            (text, or chat messages) and what its reward reads; `answer`, if it has one, is the rules' ground truth.
        eval_data: Held-out rows; None holds out the last tenth of `data`, at most 256.
        reward: `(text, row) -> number`, or a plug-in's name (`reward.path`).
        advantage: `AdvantageInput -> (T,) tensor`, an `Estimator`, or a name (`algorithm.advantage`).
        loss: `PolicyLossInput -> (T,) tensor`, a `PolicyLoss`, or a name (`algorithm.loss`).
        output_dir: Where everything is written; None makes `outputs/<name>-<date>-<time>`.
        resume: Go on with the run in `output_dir`; "anyway" also if its data, base model or code changed.
        callback: Called with every step's record, in the run's thread.
        wait: Return when the run has ended; False returns at once, and iterating gives the steps as they end.
        console: Shows the plan and the steps.
        overrides: Any other keys: `steps=20`, `batch={"batch_size": 32}`, `**{"engine.optimizer.lr": 1e-5}`. Where
            a key takes a plug-in, a function or class may stand.

    Raises:
        InputError: something cannot work; nothing was started.
        TrainerError: the run failed; with `wait=False` the run raises it.
    """
    keys: dict[str, Any] = {}
    files: dict[Path, str] = {}
    if data is not None and not isinstance(data, (str, Path)):
        output_dir = output_dir or new_output_dir(overrides.get("name", "train"))
        keys, files = _as_files(Path(output_dir), data, eval_data)
    elif data is not None:
        keys["data.path"] = data
    own = {"model.path": model, "reward.path": reward, "algorithm.advantage": advantage, "algorithm.loss": loss}
    keys |= {key: value for key, value in (own | {"output_dir": output_dir}).items() if value is not None}
    started = Run(_config(recipe, keys | flat(overrides)), callback=callback, resume=resume, console=console)
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    started._start(in_thread=not wait or _has_event_loop())  # pyright: ignore[reportPrivateUsage]
    return started.wait() if wait else started


class Run:
    """A training run: its steps as they end, its numbers, and its model.

    Iterating gives every step's `StepRecord`, from the first one on, and waits for those to come.
    """

    def __init__(
        self,
        config: Config,
        *,
        callback: Callable[[StepRecord], object] | None = None,
        resume: Resume = False,
        console: Console | None = None,
    ) -> None:
        self.config = config
        self._callback, self._console = callback, console
        self._resume: Resume = resume
        self._records: dict[int, StepRecord] = {}
        self._changed, self._is_over = threading.Condition(), False
        self._stop, self._thread = threading.Event(), None
        self._summary: dict[str, Any] | None = None
        self._error: BaseException | None = None

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics per step so far: every number of `metrics.jsonl` under a flat name, and `step`."""
        return [{"step": step, **record.scalars()} for step, record in sorted(self._records.items())]

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the run, as in `summary.json`; waits for the end."""
        self.wait()
        assert self._summary is not None, "it ended well"
        return self._summary

    @property
    def model_path(self) -> Path:
        """Folder of the trained model, as Hugging Face's libraries read it; waits for the end.

        Raises:
            ConfigError: there are several; theirs are `policies/NAME/model` of the checkpoint.
        """
        if self.config.policies:
            names = ", ".join(self.config.policies)
            raise ConfigError(f"the run has the policies {names}: see policies/NAME/model in summary['checkpoint']")
        return Path(self.summary["checkpoint"]) / "model"

    def wait(self) -> Run:
        """Wait for the end. Ctrl-C ends the run after its step, with a checkpoint; a second one waits no longer.

        Raises:
            TrainerError, InputError: the run failed.
        """
        while self._thread is not None and self._thread.is_alive():
            try:
                self._thread.join(_POLL_S)
            except KeyboardInterrupt:
                if self._stop.is_set():
                    raise
                self.stop()
        if self._error is not None:
            raise self._error
        return self

    def stop(self) -> None:
        """Have the run end after the step in progress, with a checkpoint."""
        self._stop.set()

    def __iter__(self) -> Iterator[StepRecord]:
        seen = -1
        while True:
            with self._changed:
                while not (news := sorted(step for step in self._records if step > seen)) and not self._is_over:
                    self._changed.wait(_POLL_S)
            if not news:
                self.wait()
                return
            for seen in news:
                yield self._records[seen]

    def _start(self, *, in_thread: bool) -> None:
        if not in_thread:
            self._work()
            return
        self._thread = threading.Thread(target=self._work, name="rl-train")
        self._thread.start()

    def _work(self) -> None:
        try:
            self._summary = run_config(
                self.config, self._console, resume=self._resume, on_step=self._add, stop=self._stop
            )
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _add(self, record: StepRecord) -> None:
        with self._changed:
            self._records[record.step] = record
            self._changed.notify_all()
        if self._callback is not None:
            self._callback(record)


def _has_event_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook: the run then gets its own thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _config(recipe: str, keys: Mapping[str, Any]) -> Config:
    """The configuration of a recipe with these keys; Python objects may replace names of plug-ins."""
    plain, objects = dict[str, Any](), dict[str, Any]()
    for key, value in keys.items():
        try:
            plain[key] = json.dumps(value, default=_path)
        except TypeError:
            objects[key] = value
    if "algorithm.loss" in objects and not any(key.startswith("algorithm.loss_options") for key in plain):
        plain["algorithm.loss_options"] = "{}"  # the recipe's are those of its own loss
    config = load_config(recipe, [f"{key}={value}" for key, value in plain.items()])
    for key, value in objects.items():
        config = _replaced(config, key.split("."), value, key)
    return config


def _path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is not a value of a configuration")


def _replaced(section: Any, path: list[str], value: Any, key: str) -> Any:
    name, rest = path[0], path[1:]
    if not is_dataclass(section) or not hasattr(section, name):
        raise ConfigError(f"{key} is not a key of the configuration")
    old = getattr(section, name)
    if rest:
        return replace(cast("Any", section), **{name: _replaced(old, rest, value, key)})
    if key == "tracking.trackers":
        return replace(cast("Any", section), trackers=_trackers(value))
    if not isinstance(old, (str, tuple, type(None))):
        raise ConfigError(f"{key} is {old!r} by default; a function or a class is not allowed there")
    return replace(cast("Any", section), **{name: _serialized(value)})


def _trackers(value: Any) -> dict[str, dict[str, Any]]:
    """Trackers and names of trackers, without options: `functools.partial` gives a class its options."""
    names = _serialized(value if isinstance(value, (list, tuple)) else [value])
    if len(found := {name: dict[str, Any]() for name in names}) < len(names):
        raise ConfigError(f"tracking.trackers={list(names)} has two trackers of one name; give each its own")
    return found


def _serialized(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(each if isinstance(each, str) else Serialized.of(each) for each in cast("list[Any]", value))
    return Serialized.of(value)


def _as_files(
    folder: Path, data: Iterable[Mapping[str, Any]], eval_data: Iterable[Mapping[str, Any]] | None
) -> tuple[dict[str, Any], dict[Path, str]]:
    """Rows as files: the keys that name them, and their texts.

    A file's name is the hash of its text: a resumed run finds its own, and no file is overwritten.
    """
    lines = _lines(data, "data")
    train = _file_of(folder, lines)
    keys: dict[str, Any] = {"data.format": "rows", "data.options": {}, "data.path": train}
    if eval_data is None:
        return keys, {train: "".join(lines)}
    held_out = _lines(eval_data, "eval_data")
    file = _file_of(folder, held_out)
    keys |= {"data.eval_path": file, "data.eval_size": len(held_out)}
    return keys, {train: "".join(lines), file: "".join(held_out)}


def _file_of(folder: Path, lines: list[str]) -> Path:
    return folder / f"rows-{hashlib.blake2b(''.join(lines).encode(), digest_size=8).hexdigest()}.jsonl"


def _lines(rows: Iterable[Mapping[str, Any]], what: str) -> list[str]:
    lines: list[str] = []
    is_table = hasattr(rows, "features")  # of the datasets package
    for number, row in enumerate(rows, start=1):
        if "prompt" not in row:
            raise DataError(f"{what}: row {number} has no 'prompt', but {sorted(row)}; give it text, or chat messages")
        try:
            made = completed(without_filled(row, {}) if is_table else row)
            lines.append(json.dumps(plain(made, f"{what}: row {number}")) + "\n")
        except TypeError as error:
            raise DataError(f"{what}: row {number} cannot be written as JSON: {error}") from error
    if not lines:
        raise DataError(f"{what} has no rows")
    return lines
