"""Weights in Megatron-LM's checkpoint format: folders of megatron-core's `dist_checkpointing` (backend `torch_dist`).

Names are those of Megatron-LM's `GPTModel` with Transformer Engine's layers, whichever layers an engine has, and any
layout reads any other's. `.metadata` in such a folder is a pickle: it is read once for what it names, and refused if
that is not what torch writes, before torch reads it.
"""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from rl_engine.backends.megatron.layout import megatron_calls
from rl_engine.checkpoint.hf_folder import replace_folder
from rl_engine.checkpoint.sharded import on_rank_0
from rl_engine.errors import CheckpointError, EngineError, ModelFolderError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from torch import Tensor

    from rl_engine.backends.megatron.architectures import Architecture
    from rl_engine.backends.megatron.model import Stage
    from rl_engine.distributed.world import World

_LATEST = "latest_checkpointed_iteration.txt"
_EMBEDDING = "embedding.word_embeddings.weight"
_CLASSES = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}  # fmt: skip
"""Classes in `.metadata`, in addition to types of numbers."""
_UNREADABLE = (OSError, EOFError, AttributeError, ImportError, IndexError)  # the last four as pickle documents
_NUMBERED = re.compile(r"decoder\.layers\.\d+\.")


def find_folder(path: str, arch: Architecture) -> Path:
    """The folder of the weights: `path`, or where it has Megatron-LM's iterations, the last of them.

    Raises:
        ModelFolderError: there is no such checkpoint, or its embedding is that of another model.
    """
    folder = Path(path)
    if (latest := folder / _LATEST).is_file():
        iteration = latest.read_text().strip()
        folder /= f"iter_{iteration:>07}" if iteration.isdigit() else iteration
    try:
        saved = maybe_load_config(str(folder))
    except (TypeError, ValueError):  # another library's metadata.json
        saved = None
    if saved is None:
        raise ModelFolderError(
            f"dist_checkpoint is {path}, and {folder} has no metadata.json of megatron-core's dist_checkpointing. Give "
            "the folder of one iteration, or the one that has latest_checkpointed_iteration.txt."
        )
    if saved.sharded_backend != "torch_dist":
        raise ModelFolderError(
            f"dist_checkpoint {folder} is of the format {saved.sharded_backend}; torch_dist is read."
        )
    found = tuple(_shapes(folder).get(_EMBEDDING, ()))
    if found[1:] != (arch.hidden_size,) or found[0] < arch.vocab_size:
        raise ModelFolderError(
            f"dist_checkpoint {folder} has {_EMBEDDING} of shape {found}; the model of model_path has "
            f"{(arch.vocab_size, arch.hidden_size)}."
        )
    return folder


def read_weights(stage: Stage, folder: Path, names: Mapping[str, Tensor], world: World) -> None:
    """Fill this rank's parameters in place from a folder. Collective.

    Args:
        stage: The model, on any device.
        folder: From `find_folder`.
        names: The parameters to read, by their names in `stage.model`.
        world: All ranks.

    Raises:
        ModelFolderError: the folder lacks a tensor, or has it in another shape; on every rank.
    """
    shapes, metadata = _shapes(folder), _content(folder)
    metadata["non_homogeneous_layers"] = any(map(_NUMBERED.match, shapes))
    with _reading(folder):
        wanted = {name: part for name, part in _parts(stage, metadata) if name in names}
        _raise_everywhere(_mismatch(stage, folder, shapes, wanted), world, ModelFolderError)
        found: Any = dist_checkpointing.load(dict(wanted), str(folder))
    with torch.no_grad():
        for name, tensor in names.items():
            tensor.copy_(found[name])


def write_weights(stage: Stage, path: str | Path, names: Mapping[str, Tensor], world: World) -> None:
    """Write a folder, which appears complete or not at all. Collective.

    megatron-core starts a process for its queue, as Python's `spawn` does: a program's own code must lie behind
    `if __name__ == "__main__"`.

    Args:
        stage: The model.
        path: The folder; one that is there is replaced.
        names: The parameters to write, by their names in `stage.model`.
        world: All ranks.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    target = Path(path).absolute()
    draft = target.with_name(f".{target.name}.draft")
    metadata = {"non_homogeneous_layers": True}  # layers by number, as they need not be alike

    def prepare() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    on_rank_0(prepare, target, world)
    parts = _parts(stage, metadata)
    # objects are what layers keep in addition to tensors (scales of float8), which Megatron-LM asks for
    wanted = {name: part for name, part in parts if name in names or isinstance(part, ShardedObject)}
    problem = None
    try:
        with megatron_calls():
            dist_checkpointing.save(wanted, str(draft), content_metadata=metadata)
    except (OSError, CheckpointingException, CheckpointException) as error:
        problem = f"Checkpoint {target} cannot be written: {error}"
    _raise_everywhere(problem, world, CheckpointError)
    on_rank_0(lambda: replace_folder(draft, target), target, world)


def _raise_everywhere(problem: str | None, world: World, kind: type[EngineError]) -> None:
    """Raise the first rank's problem on every rank. Collective."""
    if (found := next((each for each in world.exchange(problem) if each), None)) is not None:
        raise kind(found)


def _parts(stage: Stage, metadata: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parts that this rank has of everything in a checkpoint, by the parameter's name in `stage.model`."""
    kind = MegatronModule if stage.arch.has_scalar_head else GPTModel  # which asks for the head of a language model
    for index, chunk in enumerate(stage.chunks):
        model: Any = chunk
        found = kind.sharded_state_dict(model, metadata=metadata | {"dp_cp_group": stage.layout.dp.group})
        apply_prefix_mapping(found, {"ahead.": "mtp.layers.0."})
        yield from ((f"{index}.{name}", part) for name, part in found.items())


def _mismatch(
    stage: Stage, folder: Path, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Any]
) -> str | None:
    """Error message for a folder that lacks one of this rank's tensors, or has it in another shape."""
    for part in wanted.values():
        built = part.build() if isinstance(part, ShardedTensorFactory) else [part]
        for tensor in nested_values(built):
            shape = tuple(tensor.global_shape)
            if shapes.get(tensor.key) != shape and not (tensor.allow_shape_mismatch and tensor.key in shapes):
                return (
                    f"dist_checkpoint {folder} has {tensor.key} of shape {shapes.get(tensor.key)}; the model of "
                    f"model_path, {stage.arch.model_type}, has {shape}."
                )
    return None


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a folder. Layers of equal shapes may be in one tensor."""
    with _reading(folder):
        with (folder / ".metadata").open("rb") as file:
            _Metadata(file).load()
        found = dist_checkpointing.load_tensors_metadata(str(folder))
    return {name: tuple(tensor.global_shape) for name, tensor in found.items() if not isinstance(tensor, ShardedObject)}


def _content(folder: Path) -> dict[str, Any]:
    """Settings that a folder's names were made with."""
    with _reading(folder):
        try:
            return dist_checkpointing.load_content_metadata(str(folder)) or {}
        except RuntimeError as error:  # torch's, of a file that is no archive
            raise OSError(f"its common.pt: {error}") from error


@contextmanager
def _reading(folder: Path) -> Generator[None]:
    """Context for reading files: every failure becomes one error."""
    try:
        with megatron_calls():
            yield
    except (CheckpointingException, CheckpointException, UnpicklingError, *_UNREADABLE) as error:
        said = str(error).strip().rpartition("\n")[2]  # of torch's, behind a traceback
        raise ModelFolderError(f"dist_checkpoint {folder} cannot be read: {said}") from error


class _Metadata(Unpickler):
    """Reader of `.metadata` that creates objects of the classes named here only."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_number = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_number or global_name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise UnpicklingError(f"its .metadata names {module_name}.{global_name}, which no checkpoint is made of")
