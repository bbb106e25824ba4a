"""The training loop of rl-sft, rl-dpo, rl-rm and rl-distill: order of rows, steps, evaluation, checkpoints, progress.

A program is a subclass of `RunConfig`: its keys, and the methods by which they become an engine, a loss and rows.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from tqdm import tqdm

from rl_engine.batch.row_batch import RowBatch
from rl_engine.checkpoint.hf_folder import folder_tokens, model_dropout, previous_folder
from rl_engine.distributed.world import expected_size, gather_values
from rl_engine.errors import ConfigError, DataError
from rl_engine.finetune.data import HUB
from rl_engine.finetune.images import ENCODED, with_pixels
from rl_engine.finetune.record import RunRecord, tracker_names, write_whole
from rl_engine.registry import check as check_engine
from rl_engine.training_worker import TrainingWorker
from rl_engine.types import (
    EngineConfig,
    Head,
    LoraConfig,
    LoraExport,
    MatmulPrecision,
    ModelInit,
    OptimizerConfig,
    Precision,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import LossFunction

_FREE_ON_RESUME = (
    "resume", "overwrite", "save_every", "eval_every", "eval_path", "log_every", "max_tokens_per_gpu", "backend",
    "trackers", "epochs",
)  # fmt: skip
"""Keys that change nothing of what is learned; `epochs` has become `steps`."""
_RECENT = "recent"
"""Step of a checkpoint and metrics of the last ones, in its record: what a target is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(ABC):
    """Base of training programs: keys of every command line, and what a program defines; `train` runs it."""

    model_path: str
    """A Hugging Face model folder with a tokenizer, or the hub's id of a model, which is downloaded."""
    data_path: str
    """A .jsonl or .parquet file, or `hf:NAME` of a dataset, `hf:NAME:SPLIT` of another split than train."""
    output_dir: str
    """Folder of the trained model. Next to it: `OUTPUT_DIR.checkpoint`, and `OUTPUT_DIR.run` with
    config, metrics and curve."""
    overwrite: bool = False
    """Replace what is in `output_dir`; a folder with files is refused otherwise."""
    eval_path: str | None = None
    """Held-out rows, as `data.path`."""
    eval_every: int = 0
    """Steps between two evaluations; 0: at the end alone."""
    steps: int = 300
    """Optimizer steps."""
    epochs: int = 0
    """Passes over the data, in the place of `steps`; 0: `steps` counts."""
    batch_size: int = 256
    """Rows (or pairs) per step, over all ranks."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps of linear warm-up, but no more than half of `steps`; the rate then falls along a cosine to a tenth of the
    peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to this."""
    max_tokens_per_gpu: int = 8192
    """Tokens of one micro-batch."""
    precision: Precision = Precision.FLOAT32
    """Number format of parameters and activations."""
    matmul_precision: MatmulPrecision = MatmulPrecision.MEDIUM
    """Precision of float32 matrix products."""
    activation_checkpointing: bool | None = False
    """Recompute each layer in the backward pass. None: on a GPU alone."""
    lora_rank: int = 0
    """Train a low-rank adapter of so many columns; 0: the whole model."""
    lora_alpha: float = 32.0
    """The adapter is scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout of the adapter's input while training."""
    lora_target_modules: str = ""
    """Names of linear layers with commas, such as q_proj,v_proj; empty: every linear layer but the head."""
    lora_export: LoraExport = LoraExport.MERGED
    """`adapter` writes a folder that peft loads, of the adapter alone."""
    freeze_vision: bool = False
    """Leave the vision tower of a model that takes images as it is, and without adapters."""
    seed: int = 0
    """Seed of initialisation, dropout and the order of rows."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none."""
    resume: bool = False
    """Go on from the checkpoint, or start if there is none; a run with other keys is refused."""
    log_every: int = 20
    """Steps between two progress lines."""
    trackers: str = ""
    """tensorboard, wandb, or both with a comma; `metrics.jsonl` is always written."""
    backend: str = "fsdp"
    """Engine backend."""

    @property
    @abstractmethod
    def loss_function(self) -> LossFunction:
        """Loss of every step and evaluation."""

    @abstractmethod
    def read(self, path: str) -> Rows:
        """Read and tokenise a data file.

        Raises:
            DataError: one of its rows cannot be used.
        """

    @property
    def engine(self) -> EngineConfig:
        """The engine that is trained."""
        return self.engine_with()

    @property
    def other_engines(self) -> tuple[EngineConfig, ...]:
        """Additional engines of the run, to be checked with it."""
        return ()

    @property
    def may_drop_out(self) -> bool:
        """Whether dropout may act in training; not where a loss compares with log-probs of the same model."""
        return True

    def check_own(self) -> None:  # noqa: B027 - nothing to refuse
        """Refuse values of the program's own keys that cannot be meant; raises `ConfigError`."""

    def score_files(self, files: Sequence[Rows]) -> None:  # noqa: B027 - nothing to add
        """Add columns to the files' rows before there is an engine to train. Collective."""

    def prepare(self, worker: TrainingWorker, rows: Rows) -> Rows:
        """A file's rows with the columns that depend on the weights as they were loaded. Collective."""
        return rows

    def complete(self, worker: TrainingWorker, rows: Rows, chosen: list[int], mine: TensorDict) -> TensorDict:
        """`mine`, the `chosen` ones of `rows`, with columns that depend on the weights as they are now. Collective."""
        return mine

    def is_reached(self, means: Mapping[str, float]) -> bool:
        """Whether to stop early, by the mean metrics of the last `log_every` steps."""
        return False

    def not_reached(self, means: Mapping[str, float]) -> str | None:
        """A sentence on a target that the last steps did not reach; None if there was none."""
        return None

    def engine_with(self, *, head: Head = Head.LM, init: ModelInit = ModelInit.PRETRAINED) -> EngineConfig:
        """The engine of a run, with this head and these weights."""
        return EngineConfig(
            model_path=self.model_path,
            init=init,
            head=head,
            optimizer=OptimizerConfig(
                lr=self.lr,
                weight_decay=self.weight_decay,
                max_grad_norm=self.max_grad_norm,
                warmup_steps=min(self.warmup_steps, self.steps // 2),
                total_steps=self.steps,
                min_lr_ratio=0.1,
            ),
            precision=self.precision,
            matmul_precision=self.matmul_precision,
            max_tokens_per_gpu=self.max_tokens_per_gpu,
            activation_checkpointing=self.activation_checkpointing,
            lora=self.lora,
            freeze_vision=self.freeze_vision,
            seed=self.seed,
        )

    @property
    def lora(self) -> LoraConfig | None:
        """The adapter that is trained; None trains the whole model."""
        if not self.lora_rank:
            return None
        return LoraConfig(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout if self.may_drop_out else 0.0,
            target_modules=tuple(name.strip() for name in self.lora_target_modules.split(",") if name.strip()),
            export=self.lora_export,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Result of a training run."""

    steps: int
    """Optimizer steps taken, those before a resume included."""
    metrics: Mapping[str, float]
    """Loss and the loss function's metrics, mean over the last `log_every` steps, each before its batch was learned."""
    eval_metrics: Mapping[str, float]
    """The same on the held-out rows after the last step; empty without them."""
    num_rows: int
    """Rows in the data file."""
    tokens: int
    """Prompt and completion tokens learned from by this process and its peers."""
    wall_s: float
    """Seconds since `started`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A tokenised data file. Item i (a row, or a pair) is rows `[i * rows_per_item, (i + 1) * rows_per_item)`."""

    columns: TensorDict
    """Rows as an engine's batch."""
    rows_per_item: int = 1
    """2 for pairs."""
    mismatched: RowBatch | None = None
    """Prompt of each row with the completion of another; for the reference point of KTO alone."""

    @property
    def num_items(self) -> int:
        """Rows, or pairs."""
        return len(self.columns) // self.rows_per_item


def train(config: RunConfig, report: Callable[[str], None] = print) -> RunReport:
    """Run a program and write `output_dir`. Every rank calls it; `report` takes a progress line at a time, on rank 0.

    Raises:
        BackendError: as `rl_engine.check`.
        CheckpointError: `resume` found another model's checkpoint.
        ConfigError: a number is out of range, or a key would do nothing.
        DataError: a data file is missing, or one of its rows cannot be used.
        ModelFolderError: a model folder cannot be loaded.
        NonFiniteError: a gradient is NaN or infinite.
    """
    started = time.perf_counter()
    _check(config)
    files = [config.read(path) for path in (config.data_path, config.eval_path) if path is not None]
    if config.epochs:
        config = replace(config, steps=math.ceil(config.epochs * files[0].num_items / config.batch_size))
    config.score_files(files)
    with SignsOfLife(report, config.steps) as alive, TrainingWorker(config.engine, config.backend) as worker:
        data, *held_out = [config.prepare(worker, rows) for rows in files]
        return _run(config, worker, data, held_out[0] if held_out else None, report, started, alive)


class SignsOfLife:
    """Progress lines every ten seconds of a run without any: what it is at, and about how long it will take.

    Args:
        report: Takes a line; on rank 0 alone.
        num_steps: Steps of the run.
    """

    interval_s = 10.0

    def __init__(self, report: Callable[[str], None], num_steps: int) -> None:
        self._report, self._num_steps = report, num_steps
        self._since = self._begun = time.perf_counter()
        self._first = self._step = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs-of-life", daemon=True)

    def __enter__(self) -> Self:
        has_bar = self._report is print and sys.stderr.isatty()
        if os.environ.get("RANK", "0") == "0" and not has_bar:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        self._since = time.perf_counter()
        if self._step == 0:
            self._first, self._begun = step, self._since
        self._step = step

    def line(self, now: float) -> str:
        """Progress line at a time of `time.perf_counter`."""
        if self._step == 0:
            return f"loading model and data, {now - self._since:.0f} s"
        done, left = self._step - self._first, self._num_steps - self._step + 1
        each = (self._since - self._begun) / done if done else now - self._since
        bound = "" if done else "at least "
        to_go = f"{bound}{each * left / 60:.1f} min to go"
        return f"step {self._step}/{self._num_steps}, {now - self._since:.0f} s; {to_go}"

    def _run(self) -> None:
        while not self._is_over.wait(self.interval_s):
            self._report(self.line(time.perf_counter()))


def _check(config: RunConfig) -> None:
    """Refuse what cannot be, before anything is read.

    Raises:
        ConfigError: names the key.
        DataError: names the file.
        BackendError, ConfigError, ModelFolderError: as `rl_engine.check`.
    """
    for name, low in (
        ("steps", 1),
        ("batch_size", 1),
        ("max_tokens_per_gpu", 1),
        ("log_every", 1),
        ("save_every", 0),
        ("eval_every", 0),
        ("epochs", 0),
        ("lora_rank", 0),
    ):
        if getattr(config, name) < low:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least {low}.")
    if Path(config.output_dir).is_file():
        raise ConfigError(f"output_dir {config.output_dir} is a file; give a folder.")
    _refuse_idle(config)
    if not (config.overwrite or config.resume) and _is_filled(Path(config.output_dir)):
        raise ConfigError(
            f"output_dir {config.output_dir} has files in it; overwrite=true replaces them, or choose another folder."
        )
    if config.eval_every and config.eval_path is None:
        raise ConfigError(f"eval_every is {config.eval_every}, but there is no eval_path to evaluate on.")
    if config.resume and not config.save_every:
        raise ConfigError("resume=true needs save_every, or the run would write no checkpoint to go on from.")
    config.check_own()
    for path in (config.data_path, config.eval_path):
        if path is not None and not path.startswith(HUB) and not Path(path).is_file():
            raise DataError(f"Data file {path} does not exist.")
    for engine in (config.engine, *config.other_engines):
        check_engine(config.backend, engine, expected_size())


def _refuse_idle(config: RunConfig) -> None:
    """Refuse keys that have no effect in combination with the others.

    Raises:
        ConfigError: names the key.
    """
    usual = {name: field.default for name, field in type(config).__dataclass_fields__.items()}
    if config.epochs and config.steps != usual["steps"]:
        raise ConfigError(f"epochs is {config.epochs} and steps {config.steps}; both say how long: leave one out.")
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_export"):
        if not config.lora_rank and getattr(config, name) != usual[name]:
            raise ConfigError(
                f"{name.replace('_', '.', 1)} does nothing without lora.rank; set it, or leave {name} out."
            )
    tracker_names(config.trackers)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def checkpoint_folder(config: RunConfig) -> Path:
    """Checkpoint folder of a run; it keeps one."""
    output = Path(config.output_dir)
    return output.with_name(f"{output.name}.checkpoint")


def _run(
    config: RunConfig,
    worker: TrainingWorker,
    data: Rows,
    held_out: Rows | None,
    report: Callable[[str], None],
    started: float,
    alive: SignsOfLife,
) -> RunReport:
    """Learn from `data` for `config.steps` steps, or until `config.is_reached`; write the model folder."""
    rank, size = rank_and_size()
    source = RowBatch(data.columns, needs_mask=True, device=torch.device("cpu"))
    lengths = source.lengths
    num_items = source.num_rows // data.rows_per_item
    evaluated: dict[str, float] = {}
    tokens = 0
    done, measured_before = _resumed(config, worker, num_items)
    recent = deque(measured_before, maxlen=config.log_every)
    means = _means(recent)
    is_over = len(recent) == config.log_every and config.is_reached(means)
    has_bar = rank == 0 and report is print and sys.stderr.isatty()
    bar = tqdm(total=config.steps, initial=done, unit="step", dynamic_ncols=True, file=sys.stderr, disable=not has_bar)
    say = bar.write if has_bar else report if rank == 0 else _say_nothing
    if done:
        say(f"resumed after step {done}" + (", the last" if done >= config.steps else ""))
    for line in _facts(config, lengths, num_items) if done < config.steps else ():
        say(line)
    record = None
    if rank == 0:
        record = RunRecord(config.output_dir, _described(config), tracker_names(config.trackers), done=done)
    for step, items in enumerate(batches(num_items, config.batch_size, config.seed, config.steps), start=1):
        if step <= done or is_over:
            continue
        step_started = time.perf_counter()
        alive.begin(step)
        chosen = rows_of(items[rank::size], data.rows_per_item)
        mine = config.complete(worker, data, chosen, _taken(source, chosen, data.rows_per_item))
        recent.append(worker.forward_backward(mine, config.loss_function).metrics)
        outcome = worker.optim_step()
        tokens += sum(lengths[row] for row in rows_of(items, data.rows_per_item))
        bar.set_postfix_str(f"loss {recent[-1]['loss']:.4f}", refresh=False)
        bar.update()
        means = _means(recent)
        step_s = time.perf_counter() - step_started
        measured = recent[-1] | {"grad_norm": outcome.grad_norm, "lr": outcome.lr}
        measured["tokens_per_s"] = sum(lengths[row] for row in rows_of(items, data.rows_per_item)) / step_s
        is_last = step == config.steps or (len(recent) == config.log_every and config.is_reached(means))
        if step % config.log_every == 0 or is_last:
            speed = tokens / (time.perf_counter() - started)
            say(
                f"step {step}/{config.steps}  {_shown(means)}  grad norm {outcome.grad_norm:.2f}  "
                f"lr {outcome.lr:.2e}  {speed:.0f} tokens/s"
            )
        if held_out is not None and (is_last or (config.eval_every and step % config.eval_every == 0)):
            evaluated = _evaluate(config, worker, held_out)
            say(f"step {step}/{config.steps}  held out: {_shown(evaluated)}")
            measured |= {f"held_out_{name}": value for name, value in evaluated.items()}
        if record is not None:
            record.add(step, measured, step_s)
        if config.save_every and (step % config.save_every == 0 or is_last):
            _save(config, worker, num_items, recent)
        if is_last:
            break
    bar.close()
    if (warning := config.not_reached(means)) is not None and worker.step >= config.steps:
        say(warning)
    worker.save_weights(config.output_dir)
    outcome = RunReport(
        steps=worker.step,
        metrics=means,
        eval_metrics=evaluated,
        num_rows=source.num_rows,
        tokens=tokens,
        wall_s=time.perf_counter() - started,
    )
    if record is not None:
        record.close(asdict(outcome))
    return outcome


def _means(recent: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(entry[name] for entry in recent) for name in recent[-1]} if recent else {}


def _facts(config: RunConfig, lengths: Sequence[int], num_items: int) -> list[str]:
    """Lines before the first step: the data, their packing, and keys that are cut or out of reach."""
    what = "rows" if len(lengths) == num_items else "pairs"
    notes = [
        f"{num_items} {what}, {sum(lengths)} tokens, longest row {max(lengths)}; {config.batch_size} {what} a step, "
        f"packed without padding into micro-batches of at most {config.max_tokens_per_gpu} tokens"
    ]
    adapter = f"lora.dropout={config.lora_dropout:g}" if config.lora_dropout and not config.may_drop_out else ""
    rates = "" if config.engine.dropout else model_dropout(config.model_path)
    if rates or adapter:
        notes.append(f"dropout is off: {', '.join(filter(None, [rates, adapter]))}")
    ends, *warnings = folder_tokens(config.model_path).lines
    notes += [f"a turn ends at {ends}", *warnings]
    warmup = min(config.warmup_steps, config.steps // 2)
    if warmup < config.warmup_steps:
        notes.append(f"warmup_steps={config.warmup_steps} is cut to {warmup}, half of {config.steps} steps")
    if config.eval_every > config.steps:
        notes.append(
            f"eval_every={config.eval_every} is beyond {config.steps} steps: held-out rows are scored at the end"
        )
    return notes


def _described(config: RunConfig) -> dict[str, Any]:
    """The keys as they are written in a command, and what `rl-view` calls the run."""
    program = type(config).__name__.removesuffix("Config").lower()
    return {"name": f"rl-{program}"} | json.loads(json.dumps(asdict(config)))


def _identity(config: RunConfig, num_items: int) -> dict[str, Any]:
    """Identity of a run, as JSON gives it back: a checkpoint of another is not resumed."""
    same = {name: value for name, value in asdict(config).items() if name not in _FREE_ON_RESUME}
    return json.loads(json.dumps(same | {"rows in data_path": num_items}))


def _record_file(config: RunConfig) -> Path:
    folder = checkpoint_folder(config)
    return folder.with_name(f"{folder.name}.json")


def _resumed(config: RunConfig, worker: TrainingWorker, num_items: int) -> tuple[int, list[dict[str, float]]]:
    """Load the checkpoint of the same run, if there is one and it is wanted; steps by then, and metrics of the last."""
    folder, record = checkpoint_folder(config), _record_file(config)
    if not config.resume or not any((place / "manifest.json").is_file() for place in (folder, previous_folder(folder))):
        return 0, []
    mine, written = _identity(config, num_items), json.loads(record.read_text()) if record.is_file() else {}
    step, recent = written.pop(_RECENT, (0, []))
    for name in sorted(mine.keys() | written.keys()):
        if mine.get(name) != written.get(name):
            raise ConfigError(
                f"{folder} was written with {name}={written.get(name)}, this run has {mine.get(name)}; "
                "resumed, it would not be the same run. Say resume=false to start anew."
            )
    done = worker.load_state(folder)
    return done, recent if step == done else []


def _save(config: RunConfig, worker: TrainingWorker, num_items: int, recent: Sequence[Mapping[str, float]]) -> None:
    """The record comes after the checkpoint: one that belongs to another run is never taken for this one's."""
    worker.save_state(checkpoint_folder(config))
    if rank_and_size()[0] == 0:
        found = _identity(config, num_items) | {_RECENT: (worker.step, [*recent])}
        write_whole(_record_file(config), json.dumps(found))


def _evaluate(config: RunConfig, worker: TrainingWorker, rows: Rows) -> dict[str, float]:
    """Loss and metrics over all rows, as one logical batch."""
    rank, size = rank_and_size()
    source = RowBatch(rows.columns, needs_mask=True, device=torch.device("cpu"))
    items = list(range(source.num_rows // rows.rows_per_item))[rank::size]
    chosen = rows_of(items, rows.rows_per_item)
    mine = config.complete(worker, rows, chosen, _taken(source, chosen, rows.rows_per_item))
    return worker.forward(mine, config.loss_function).metrics


def _taken(source: RowBatch, chosen: list[int], rows_per_item: int) -> TensorDict:
    """The chosen rows; a pair that comes twice in one step is two pairs."""
    mine = with_pixels(source.select(chosen))
    if rows_per_item > 1:
        mine["pair_id"] = torch.arange(len(chosen)) // rows_per_item
    return mine


def score_all(worker: TrainingWorker, rows: TensorDict, names: Sequence[str]) -> dict[str, Tensor]:
    """Per-token columns of every row under the weights as they are now; every rank scores its share. Collective."""
    rank, size = rank_and_size()
    source = RowBatch(rows, needs_mask=False, device=torch.device("cpu"))
    at_once = 32 if source.has(ENCODED) else 1024
    found: dict[int, tuple[Tensor, ...]] = {}
    for start in range(0, source.num_rows, at_once * size):
        mine = list(range(start, min(start + at_once * size, source.num_rows)))[rank::size]
        columns = worker.forward(with_pixels(source.select(mine))).columns
        if mine:
            found |= dict(zip(mine, zip(*(columns.get(name).unbind() for name in names), strict=True), strict=True))
    shares = gather_values(found) if size > 1 else [found]
    whole = {row: values for share in shares for row, values in share.items()}
    return {
        name: torch.nested.nested_tensor_from_jagged(
            torch.cat([whole[row][index] for row in range(source.num_rows)]), source.completion_offsets
        )
        for index, name in enumerate(names)
    }


def rank_and_size() -> tuple[int, int]:
    """Rank and number of ranks of this process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def rows_of(items: list[int], rows_per_item: int) -> list[int]:
    """The rows of the given items, in order."""
    return [item * rows_per_item + offset for item in items for offset in range(rows_per_item)]


def batches(num_items: int, batch_size: int, seed: int, steps: int) -> Iterator[list[int]]:
    """Items of each step: every item once before any comes again, in an order drawn anew each time round."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    for _ in range(steps):
        while len(queue) < batch_size:
            queue += torch.randperm(num_items, generator=generator).tolist()
        yield queue[:batch_size]
        del queue[:batch_size]


def _say_nothing(line: str) -> None:
    """Another rank reports."""


def _shown(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
