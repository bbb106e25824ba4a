"""Checkpoint folders: tensors by torch.distributed.checkpoint, everything else in a manifest that is written last.

A folder without `manifest.json` does not exist as far as loading is concerned. Tensors are stored whole or as shards
with their offsets, so that any world size reads what any other wrote.
"""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from rl_engine._folder import previous_folder, replace_folder, sync_to_disk
from rl_engine.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from rl_engine._distributed import World

_FORMAT = "rl-engine-checkpoint/1"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    """The caller's step."""
    schedule_step: int
    """Position in the learning-rate schedule."""
    world_size: int
    """Ranks that wrote it."""
    tensors: dict[str, list[int]]
    """Global shape of every tensor but the RNG states."""


def save(path: str | Path, tensors: Mapping[str, Tensor], manifest: Manifest, world: World) -> None:
    """Write a checkpoint folder; it appears complete or not at all. Collective.

    Raises:
        CheckpointError: a file cannot be written, or ranks give different paths or steps; on every rank.
    """
    target = Path(path).absolute()
    draft = target.with_name(f".{target.name}.draft")
    said = world.exchange((str(target), manifest.step))
    if (other := next((mine for mine in said if mine != said[0]), None)) is not None:
        raise CheckpointError(f"Ranks save different checkpoints (path and step): {said[0]} and {other}.")

    def prepare() -> None:
        _recover(target)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def finish() -> None:
        (draft / _MANIFEST).write_text(json.dumps({"format": _FORMAT, **asdict(manifest)}))
        sync_to_disk(draft / _MANIFEST)
        replace_folder(draft, target)

    _on_rank_0(prepare, target, world)
    writer = FileSystemWriter(draft, sync_files=True)
    try:
        with _alone_is_fine():
            save_shards(dict(tensors), storage_writer=writer, no_dist=world.size == 1, process_group=world.group)
    except (CheckpointException, OSError, RuntimeError) as error:  # raised on every rank; the last: a peer is gone
        raise CheckpointError(f"Checkpoint {target} cannot be written: {error}") from error
    world.barrier()
    _on_rank_0(finish, target, world)


def _on_rank_0(work: Callable[[], None], target: Path, world: World) -> None:
    """Let rank 0 do it; its failure is raised on every rank. Collective."""
    problem = None
    if world.rank == 0:
        try:
            work()
        except OSError as error:
            problem = f"Checkpoint {target} cannot be written: {error}"
    problem = world.exchange(problem)[0]
    if problem is not None:
        raise CheckpointError(problem)


def rng_state(device: torch.device) -> Tensor:
    """Of this rank's generators, as bytes."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def known_rng(manifest: Manifest, world: World) -> dict[str, Tensor]:
    """Where this rank's generators are to be read into; empty if it was not there when the checkpoint was written."""
    return {f"rng.{world.rank}": rng_state(world.device)} if world.rank < manifest.world_size else {}


def take_rng(rng: Mapping[str, Tensor], manifest: Manifest, world: World, seed: int) -> None:
    """Set this rank's generators to what was read; one that was not there seeds itself anew."""
    if not rng:
        torch.manual_seed(hash((seed, manifest.step, world.rank)) % 2**63)
        return
    (state,) = rng.values()
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state[size:].clone(), world.device)


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    target = Path(path).absolute()
    file = target / _MANIFEST
    if not file.is_file():
        file = previous_folder(target) / _MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{target} holds no complete checkpoint (no {_MANIFEST}). Give the folder of an earlier step."
        )
    try:
        fields: dict[str, Any] = json.loads(file.read_text())
        if fields.pop("format", None) != _FORMAT:
            raise CheckpointError(f"{file} is not of format {_FORMAT}; this version of rl-engine cannot read it.")
        return Manifest(**fields)
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}). Give the folder of an earlier step.") from error


def load(path: str | Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill `tensors` in place from a checkpoint, all of them or none. Collective.

    Raises:
        CheckpointError: a tensor is absent or of another shape, or a file cannot be read.
    """
    target = Path(path).absolute()
    if world.rank == 0:
        _recover(target)
    world.barrier()
    read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    problem = None
    try:
        with _alone_is_fine():
            load_shards(read, storage_reader=FileSystemReader(target), no_dist=world.size == 1)
    except (CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
        problem = f"Checkpoint {target} cannot be read: {(str(error).strip().splitlines() or [repr(error)])[0]}"
    problems = [text for text in world.exchange(problem) if text]
    if problems:
        raise CheckpointError(problems[0])
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(read[name])


def check_tensors(path: str | Path, manifest: Manifest, wanted: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks one of `wanted` or has it in another shape.

    Raises:
        CheckpointError: names the first such tensor.
    """
    for name, tensor in wanted.items():
        shape = manifest.tensors.get(name)
        if shape is None:
            raise CheckpointError(
                f"Checkpoint {path} has no tensor {name}: it belongs to another model, or to a frozen engine."
            )
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"Checkpoint {path} belongs to another model: {name} has shape {shape}, "
                f"this model's is {list(tensor.shape)}."
            )
    extra = [name for name in manifest.tensors if name.startswith("model.") and name not in wanted]
    if extra:
        raise CheckpointError(
            f"Checkpoint {path} belongs to another model: it has {extra[0]}, which this model has not."
        )


@contextmanager
def _alone_is_fine() -> Generator[None]:
    """A single process is no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _recover(target: Path) -> None:
    """Finish a replacement that was killed between its two renames."""
    previous = previous_folder(target)
    if previous.is_dir() and not target.exists():
        previous.rename(target)
