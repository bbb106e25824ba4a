"""The record of a training run: `config.yaml`, `metrics.jsonl`, a learning curve, and trackers.

It is in `OUTPUT_DIR.run`, next to the model folder, which holds a model and nothing else. The lines of `metrics.jsonl`
are those of rl-train, so that `rl-view OUTPUT_DIR.run` shows the run.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_engine.errors import BackendError, ConfigError, naming

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRACKERS = ("tensorboard", "wandb")
"""Names that `trackers` takes."""


def run_folder(output_dir: str) -> Path:
    """Folder of the record of the run that writes `output_dir`."""
    output = Path(output_dir)
    return output.with_name(f"{output.name}.run")


def tracker_names(text: str) -> list[str]:
    """The names in a list with commas.

    Raises:
        BackendError: its package is not installed.
        ConfigError: one is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"trackers names {name!r}; wanted {' or '.join(TRACKERS)}, or both with a comma.")
        if find_spec(name) is None:
            raise BackendError(f"trackers={name} needs a package that is not installed; try: pip install {name}")
    return names


class RunRecord:
    """Writes what a run measures, a line per step; lines of steps that are taken again are dropped.

    Args:
        output_dir: The run's.
        config: Its keys, as JSON-able values; `name` and `steps` among them.
        trackers: Names, of `TRACKERS`.
        done: Steps that earlier processes took.
    """

    def __init__(self, output_dir: str, config: Mapping[str, Any], trackers: Sequence[str], *, done: int) -> None:
        self.folder = run_folder(output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "metrics.jsonl"
        kept = [line for line in self._lines() if line["step"] <= done]
        write_whole(self._file, "".join(json.dumps(line) + "\n" for line in kept))
        (self.folder / "summary.json").unlink(missing_ok=True)
        write_whole(self.folder / "config.yaml", json.dumps(dict(config), indent=2) + "\n")  # JSON is YAML
        self._tensorboard = self._wandb = None
        if "tensorboard" in trackers:
            self._tensorboard = _tensorboard(self.folder, done)
        if "wandb" in trackers:
            self._wandb = _wandb(self.folder, config)

    def add(self, step: int, metrics: Mapping[str, float], wall_s: float) -> None:
        """Add one step's numbers; those of held-out rows are named `held_out_...`."""
        line = {"step": step, "metrics": dict(metrics), "phase_s": {"update": wall_s}}
        with naming(self._file), self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run ended well: write the summary and the curve."""
        write_whole(self.folder / "summary.json", json.dumps(dict(summary), indent=2) + "\n")
        _draw(self._lines(), self.folder / "learning_curve.png")
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines of the file: a kill may have torn the last one."""
        found: list[dict[str, Any]] = []
        for line in self._file.read_text().splitlines() if self._file.is_file() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


def write_whole(file: Path, text: str) -> None:
    """Write a text file; it appears whole or not at all."""
    draft = file.with_name(f"{file.name}.unfinished")
    with naming(file):
        draft.write_text(text)
        draft.replace(file)


def _tensorboard(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)


def _wandb(folder: Path, config: Mapping[str, Any]) -> Any:
    import wandb

    return wandb.init(
        project=str(config["name"]), name=folder.name.removesuffix(".run"), dir=str(folder), config=dict(config)
    )


def _draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss by step, where matplotlib is installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, style in (("loss", "-"), ("held_out_loss", "o-")):
        points = [(line["step"], line["metrics"][name]) for line in lines if name in line["metrics"]]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), alpha=0.9, markersize=4)
    axes.set(xlabel="step", ylabel="loss", title="learning curve")
    axes.grid(alpha=0.3)
    axes.legend()
    with naming(path):
        figure.savefig(path, dpi=120)
