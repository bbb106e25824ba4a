"""Saved samples of a run: a parquet file per step, a row per sample, a ragged list per column of tokens.

Of some groups of some steps, or of all with `tracking.keep_samples=true`. Columns: `prompt`, `completion` (text),
`reward`, `finish_reason`, and the queue's own, such as `completion_token_ids`, `loss_mask`, `rollout_logprobs`,
`advantages`, `weight_version_min`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from rl_engine.errors import naming
from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from torch import Tensor


FOLDER = "samples"
"""Folder of the samples in `output_dir`."""
_NAME = re.compile(r"step-(\d+)\.parquet")


def file_of(folder: Path, step: int) -> Path:
    """Path of a step's file."""
    return folder / f"step-{step:06d}.parquet"


def write_samples(path: Path, columns: Mapping[str, Tensor | list[Any]]) -> int:
    """Write a step's samples atomically; returns the bytes on disk.

    Columns are jagged tensors, tensors or lists, with a row per sample.
    """
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({name: _array(column) for name, column in columns.items()})
    partial = path.with_suffix(".partial")
    with naming(path):
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(path)
    return path.stat().st_size


def _array(column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, list):
        return pa.array(column)
    if column.is_nested:
        return pa.ListArray.from_arrays(_array(column.offsets().int()), _array(column.values()))
    if column.ndim > 1:  # parts of a reward, a teacher's candidates
        return pa.FixedSizeListArray.from_arrays(_array(column.flatten(0, 1)), column.shape[1])
    return pa.array(column.numpy())


def forget_after(run: Path, step: int) -> None:
    """Remove the files of later steps, which will be taken again."""
    for later in steps_of(run):
        if later > step:
            file_of(run / FOLDER, later).unlink()


def steps_of(run: str | Path) -> list[int]:
    """The steps whose samples a run saved, in order."""
    return sorted(int(m[1]) for p in (Path(run) / FOLDER).glob("*.parquet") if (m := _NAME.fullmatch(p.name)))


def read_samples(run: str | Path, *, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> Any:
    """The samples of a run as one `pyarrow.Table`, with a column `step` before the others.

    Of all steps, and all columns, unless some are named.

    Raises:
        DataError: the run kept none, or not those of a step, or pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("reading samples needs pyarrow: pip install 'rl-post-trainer[parquet]'") from error
    kept = steps_of(run)
    if not kept:
        raise DataError(f"{run} holds no samples: tracking.keep_samples=true keeps them all, `some` a few")
    wanted = kept if steps is None else list(steps)
    if missing := set(wanted) - set(kept):
        raise DataError(
            f"{run} has no samples of step {min(missing)}; there are {len(kept)} steps from {kept[0]} to {kept[-1]}"
        )
    tables: list[Any] = []
    for step in wanted:
        table = parquet.read_table(
            file_of(Path(run) / FOLDER, step), columns=None if columns is None else list(columns)
        )
        tables.append(table.add_column(0, "step", pa.array([step] * len(table), pa.int32())))
    return pa.concat_tables(tables, promote_options="default")


Order = Literal["first", "best", "worst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """Sample as `rl-sample` shows it."""

    title: str
    """Title: step and group, or row and number."""
    prompt: str
    completion: str
    """Completion, as text, with what tools answered."""
    reward: float


def kept(run: str | Path, *, step: int | None, order: Order, count: int) -> list[ShownSample]:
    """Saved samples of one step of a run, the last step if None.

    Raises:
        DataError: the run kept none, or none of that step.
    """
    steps = steps_of(run)[-1:] if step is None else [step]
    columns = ["group_id", "prompt", "completion", "reward", "finish_reason", "weight_version_min"]
    rows: list[dict[str, Any]] = read_samples(run, steps=steps or None, columns=columns).to_pylist()
    if order != "first":
        rows.sort(key=lambda row: row["reward"], reverse=order == "best")
    return [
        ShownSample(
            title="step {step}, group {group_id}, weights {weight_version_min}, {finish_reason}".format_map(row),
            prompt=row["prompt"],
            completion=row["completion"],
            reward=row["reward"],
        )
        for row in rows[:count]
    ]


def show(console: Console, samples: list[ShownSample]) -> None:
    """Print samples, each in a frame."""
    for shown in samples:
        text = Group(Text(shown.prompt.rstrip(), style="dim"), Text(shown.completion.rstrip()))
        console.print(Panel(text, title=Text(shown.title), subtitle=Text(f"reward {shown.reward:.3f}")))
