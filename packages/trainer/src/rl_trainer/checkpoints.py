"""Checkpoints of a run: written after a step, verified, resumed from.

A folder `checkpoint-N` has the state of engine and critic, the rows of the queue that wait to be learned from, an
ordinary model folder, and a state file, which is written last: a folder without it, or without a whole engine, is not
a checkpoint. A run that is killed at any moment resumes from the newest complete one.

The state file is a manifest (`rl_engine.types.write_manifest`): it has a digest of itself and of every file that is no
engine's, and each engine's folder has a manifest of its own. A checkpoint of which a file is not as it was written is
damaged: nothing goes on from it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_engine.errors import CheckpointError
from rl_engine.types import digest_files, find_damage, read_manifest, write_manifest
from rl_trainer import samples
from rl_trainer.config import as_tree
from rl_trainer.config.load import flat
from rl_trainer.errors import InputError
from rl_trainer.inputs import changed, digest_inputs, digest_rows
from rl_trainer.metrics import HeldGroup
from rl_trainer.output_dir import write_whole
from rl_trainer.workers.agent import Stopped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets
    from rl_trainer.metrics import StepRecord
    from rl_trainer.pipeline.components import Components

STATE_FILE = "trainer_state.json"
_OF_THE_PROCESS = ("output_dir", "resume_from")
"""Keys in which a resumed run always differs."""
_ENGINE_MANIFEST = "manifest.json"
"""Manifest in each engine's folder, see `rl_engine.base.Engine.save_checkpoint`."""
STOPPED_FILE = "stopped.json"
"""File of a checkpoint with the completions that were stopped (`batch.over_sampling`)."""
_FOLDERS = ("queue", "model", "reference", "policies/*/model", "policies/*/reference")
"""Folders of a checkpoint other than those of engines."""
LOGS = ("metrics.jsonl", "prompts.jsonl")
"""Files of a run with one line per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of the controller in a checkpoint."""

    step: int = 0
    """Training steps done."""
    position: int = 0
    """Prompts taken from the data."""
    pending: tuple[int, ...] = ()
    """Rows among them that are to be generated again."""
    held: tuple[HeldGroup, ...] = ()
    """Groups among them that are finished and in the queue."""
    history: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """State of the replay buffer, whose rows are in the queue."""
    kl_coef: float | None = None
    """Coefficient of the KL in the rewards, where it follows a target; None: that of the configuration."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus, where it follows a target; None: that of the configuration."""
    order: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """State of the sampler, in addition to `position` and `pending`."""
    pipeline: str = ""
    """The schedule that wrote it; only the same one resumes with `held`."""
    seed: int
    """Seed of the run, which orders the prompts."""
    num_rows: int
    """Rows of the data."""
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of what the run reads, see `rl_trainer.inputs`."""
    engines: tuple[str, ...] = ("engine",)
    """Folders of actors and critics; with `engine.async_checkpoints` they are complete after the state file."""
    policies: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict[str, Any])
    """By name, the coefficients of each of several policies."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The configuration of the run that wrote it, as `as_tree` gives it."""

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state of a complete checkpoint.

        Raises:
            InputError: the folder is not a checkpoint, or another version wrote it.
        """
        if not is_complete(folder):
            raise InputError(
                f"{folder} is not a complete checkpoint folder: it has no {STATE_FILE}, or no engine; give one that has"
            )
        try:
            values = read_manifest(folder / STATE_FILE)
        except CheckpointError as error:
            raise InputError(f"{error} Give an earlier checkpoint, or let --resume find one.") from error
        del values["files"]
        values["pending"] = tuple(values.get("pending", ()))
        values["held"] = tuple(HeldGroup(*group) for group in values.get("held", ()))
        values["engines"] = tuple(values.get("engines", ("engine",)))
        return cls(**values)

    def for_run(self, config: Config) -> RunState:
        """The state for a run: resumed groups of another pipeline, batch size or staleness are generated again."""
        own = replace(self, history={}) if self.history and config.batch.replay is None else self
        num_made = len(own.held) + len(own.history.get("drawn", ()))
        is_whole = config.pipeline != "one_step_off" or num_made == config.batch.batch_size
        ages = asdict(config.staleness)  # held to another policy, or a lower bound, they may be too old
        if config.pipeline == self.pipeline and is_whole and self.config.get("staleness", ages) == ages:
            return own
        return replace(own, held=(), pending=(*(group.row_index for group in self.held), *self.pending))

    def changes(self, config: Config) -> list[str]:
        """Changed keys of a resumed run, as `key=value (was value)`."""
        before, after = flat(self.config), flat(as_tree(config))
        keys = [key for key in after | before if key not in _OF_THE_PROCESS] if before else []
        made = [key for key in keys if key.endswith("model.path") and before.get(key) is None]  # given to later runs
        keys = [key for key in keys if key not in made]
        return [f"{key}={after.get(key)} (was {before.get(key)})" for key in keys if after.get(key) != before.get(key)]

    def after(self, record: StepRecord, components: Components, config: Config) -> dict[str, Any]:
        """State after a step, as JSON values."""
        order = components.source.order.state_dict()
        policies = components.by_policy
        coefs = {name: _coefs_of(own) for name, own in policies.items()}
        return asdict(self) | {
            "step": record.step,
            "position": record.position,
            "pending": [*record.pending, *order.pop("returned")],
            "held": [*record.held],
            "history": {} if components.replay is None else components.replay.state(),
            **coefs.get("", {}),
            "policies": {name: own for name, own in coefs.items() if name},
            "order": order,
            "pipeline": config.pipeline,
            "engines": [
                (folder_of(Path(), policy) / name).as_posix()
                for policy, own in policies.items()
                for name in ("engine", *(["critic"] if own.critic is not None else []))
            ],
            "config": as_tree(config),
        }


def folder_of(folder: Path, policy: str) -> Path:
    """Folder of a policy in a checkpoint or in `output_dir`: the whole of it if it is the only one."""
    return folder / "policies" / policy if policy else folder


def _coefs_of(components: Components) -> dict[str, float | None]:
    kl, entropy = components.kl, components.entropy
    return {"kl_coef": kl.coef if kl.target else None, "entropy_coef": entropy.coef if entropy.target else None}


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was written to its end; `damage` says whether it still is as it was written."""
    file = folder / STATE_FILE
    if not file.is_file():
        return False
    return all((folder / name).is_dir() for name in _engines_of(folder))


def _engines_of(folder: Path) -> list[str]:
    """Folders of actor and critic by the state file; none if that is damaged."""
    try:
        return read_manifest(folder / STATE_FILE).get("engines", ["engine"])
    except CheckpointError:
        return []


def newest(output_dir: Path) -> Path | None:
    """Newest complete checkpoint of a run; None if there is none."""
    return next(iter(complete(output_dir)), None)


def complete(output_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, newest first."""
    folders = (folder for folder in output_dir.glob("checkpoint-*") if _step_of_folder(folder) >= 0)
    return sorted((folder for folder in folders if is_complete(folder)), key=_step_of_folder, reverse=True)


def damage(folder: Path) -> list[str]:
    """Damage of a complete checkpoint: a line per file that is not as it was written. Reads every file."""
    lines = find_damage(folder / STATE_FILE)
    return lines + [line for name in _engines_of(folder) for line in find_damage(folder / name / _ENGINE_MANIFEST)]


def inspect(folder: Path) -> list[tuple[Path, list[str]]]:
    """Checkpoints and the damage of each: of a run's `output_dir`, of a checkpoint's folder, or of an engine's.

    Raises:
        InputError: there is no checkpoint.
    """
    if (folder / STATE_FILE).is_file():
        return [(folder, damage(folder))]
    if (folder / _ENGINE_MANIFEST).is_file():
        return [(folder, find_damage(folder / _ENGINE_MANIFEST))]
    found = [(checkpoint, damage(checkpoint)) for checkpoint in reversed(complete(folder))]
    if not found:
        raise InputError(f"{folder} holds no complete checkpoint; give the output_dir of a run that has saved one")
    return found


def unfinished(output_dir: Path) -> list[Path]:
    """Unfinished checkpoints: folders that were not written to their end."""
    folders = (folder for folder in output_dir.glob("checkpoint-*") if _step_of_folder(folder) >= 0)
    return sorted(folder for folder in folders if not is_complete(folder))


def newest_whole(output_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """Newest checkpoint without damage, and the damage of newer ones.

    Raises:
        InputError: there are complete checkpoints, and all of them are damaged.
    """
    found: dict[Path, list[str]] = {}
    for folder in complete(output_dir):
        lines = damage(folder)
        if not lines:
            return folder, found
        found[folder] = lines
    if found:
        reasons = "; ".join(lines[0] for lines in found.values())
        raise InputError(
            f"every checkpoint in {output_dir} is damaged: {reasons}. Bring back one that is whole, or take them "
            "away to start anew"
        )
    return None, found


def set_aside(output_dir: Path, start: Path | None) -> list[Path]:
    """Rename the damaged checkpoints of later steps than `start`, so that a later run does not find them."""
    step = -1 if start is None else _step_of_folder(start)
    moved: list[Path] = []
    for folder in complete(output_dir):
        if _step_of_folder(folder) > step:
            target = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(target, ignore_errors=True)
            moved.append(folder.rename(target))
    return moved


def _step_of_folder(folder: Path) -> int:
    """The N of `checkpoint-N`; -1 for any other folder."""
    digits = folder.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else -1


def save(components: Components, folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint: queue, engines, model, and last the state file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_FILE).unlink(missing_ok=True)  # of an earlier attempt at the same step
    if state["held"] or state["history"].get("groups"):
        components.queue.snapshot(folder / "queue")
    if state["config"]["batch"]["over_sampling"] and state["pending"]:
        stopped = [asdict(each) for each in components.agents.stopped()]
        write_whole(folder / STOPPED_FILE, json.dumps(stopped))
    for policy, own in components.by_policy.items():
        at = folder_of(folder, policy)
        own.actor.save_checkpoint(str(at / "engine"), state["step"])
        own.actor.save_model(str(at / "model"))
        if own.critic is not None:
            own.critic.save_checkpoint(str(at / "critic"), state["step"])
        if own.ema_reference is not None:
            own.ema_reference.save(at)
    files = (path for name in _FOLDERS for at in folder.glob(name) for path in at.rglob("*") if path.is_file())
    files = (*files, *folder.glob(STOPPED_FILE))
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    write_manifest(folder / STATE_FILE, state, digest_files(folder, names))


def prune(output_dir: Path, keep: int) -> list[Path]:
    """Remove complete checkpoints but the `keep` newest, and return their folders; 0 keeps all."""
    old = complete(output_dir)[keep:] if keep else []
    for folder in old:
        (folder / STATE_FILE).unlink()  # first: what is half removed is no checkpoint
        shutil.rmtree(folder, ignore_errors=True)
    return old


def finish(components: Components) -> None:
    """Wait for asynchronous checkpoints and free the engines, at the end of a run.

    Raises:
        Exception: what the writing of the last checkpoint failed with.
    """
    policies = components.by_policy.values()
    for own in policies:
        if own.critic is not None:
            own.critic.finish()
    for own in policies:
        own.actor.finish()  # last: its process group is the critic's too


def load(components: Components, folder: Path) -> None:
    """Load the engines' state and stopped completions. The queue was served with its snapshot already."""
    if (file := folder / STOPPED_FILE).is_file():
        found: list[dict[str, Any]] = json.loads(file.read_text())
        components.agents.restore([Stopped(**each) for each in found])
    for policy, own in components.by_policy.items():
        own.actor.load_checkpoint(str(folder_of(folder, policy) / "engine"))
        if own.critic is not None:
            own.critic.load_checkpoint(str(folder_of(folder, policy) / "critic"))


def queue_snapshot(config: Config, state: RunState) -> str | None:
    """Snapshot folder that the queue is served with; None: it begins empty."""
    has_rows = state.held or state.history.get("groups")
    return str(Path(config.resume_from) / "queue") if config.resume_from is not None and has_rows else None


def forget_after(output_dir: Path, step: int) -> None:
    """Remove later steps, and a torn last line, from a run's logs and samples: those steps will be taken again.

    The evaluation with which an earlier process resumed from `step` is removed too.
    """
    for folder in (output_dir, *output_dir.glob("policies/*")):
        samples.forget_after(folder, step)
    for log in (output_dir / name for name in LOGS):
        if not log.is_file():
            continue
        lines = [line for line in log.read_text().splitlines() if _time_of(line) <= step]
        write_whole(log, "".join(f"{line}\n" for line in lines))


def _time_of(line: str) -> float:
    """Step of a log's line, for sorting: an evaluation alone counts half a step more."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:  # the process was killed while it wrote the line
        return float("inf")
    is_evaluation = found.get("reward", 0.0) is None
    return found["step"] + (0.5 if is_evaluation and found["step"] else 0.0)


def check_output_dir(config: Config, output_dir: Path, *, is_resumed: bool = False) -> None:
    """Check that an output folder does not hold another run.

    `is_resumed`: the run goes on with what is there, from the start if that had no checkpoint yet.

    Raises:
        InputError: says which is there.
    """
    start = None if config.resume_from is None else Path(config.resume_from)
    own = start if start is not None and start.resolve().parent == output_dir.resolve() else None
    if own is None and (output_dir / "summary.json").exists():
        raise InputError(
            f"output_dir={config.output_dir} already holds a finished run; choose another, so that nothing is "
            "overwritten"
        )
    last = newest(output_dir)
    if own is not None and last is not None and last.resolve() != own.resolve():
        last, _ = newest_whole(output_dir)  # a damaged one is set aside by the run
    is_another = last is not None or (
        not is_resumed and any(log.stat().st_size for name in LOGS if (log := output_dir / name).is_file())
    )
    if own is None and is_another:
        raise InputError(
            f"output_dir={config.output_dir} already holds a run that did not end; go on with it (--resume), choose "
            "another, or take it away: its steps would be counted among this one's"
        )
    if own is not None and last is not None and last.resolve() != own.resolve():
        raise InputError(
            f"resume_from={config.resume_from} is not the newest checkpoint in output_dir, which is {last.name}; "
            "choose another output_dir, or take the newer ones away: a later --resume would go on from them"
        )


def check_resume(config: Config, num_rows: int, *, is_known_whole: bool = False) -> None:
    """Check that the checkpoint to resume from is whole, has steps left, and was made of the same prompts.

    `is_known_whole`: its files have been compared with their digests a moment ago.

    Raises:
        InputError: it is not, or the order of prompts would be another one.
    """
    if config.resume_from is None:
        return
    folder = Path(config.resume_from)
    if not is_known_whole and is_complete(folder) and (lines := damage(folder)):
        more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
        raise InputError(f"{lines[0]}{more}; give an earlier checkpoint, or let --resume find one")
    state = RunState.read(folder)
    if state.policies.keys() != config.policies.keys():
        had, has = (", ".join(sorted(each.policies)) or "none by name" for each in (state, config))
        raise InputError(
            f"resume_from={config.resume_from} has the policies: {had}; this run has: {has}; give policies those names"
        )
    if state.step >= config.steps:
        raise InputError(
            f"resume_from={config.resume_from} is at step {state.step} already, and steps={config.steps}; raise steps"
        )
    if (state.num_rows, state.seed) != (num_rows, config.seed):
        raise InputError(
            f"resume_from={config.resume_from} took its prompts from {state.num_rows} rows with seed "
            f"{state.seed}, but this run has {num_rows} rows and seed={config.seed}; give it the same"
        )
    if config.model.path is None:
        raise InputError(
            "resume_from needs model.path: the folder that the first run started from (its output_dir/model)"
        )


def check_inputs(config: Config, datasets: Datasets, *, is_forced: bool = False) -> list[str]:
    """Check that the run reads what the checkpoint's run read; the names of what differs, if that is asked for.

    A stream is read up to the position of the checkpoint, where the run goes on.

    Raises:
        InputError: something differs, and `is_forced` is false.
    """
    if config.resume_from is None:
        return []
    state = RunState.read(Path(config.resume_from))
    found = changed(state.inputs, digest_inputs(config, datasets)) if state.inputs else []
    if datasets.stream is not None:
        stream, digests = datasets.stream, state.order.get("digests", ())
        found += ["training rows"] if any(digest_rows([stream[i]]) != digest for i, digest in digests) else []
    if found and not is_forced:
        raise InputError(
            f"{', '.join(found)}: no longer as when {config.resume_from} was written. Restore what changed, or go on "
            "with the new ones by --resume=anyway"
        )
    return found
