"""Registry: backends by name (entry points of group `rl_engine.backends`), model folders by path or id of the hub."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from rl_engine.errors import BackendError, ConfigError, ModelFolderError
from rl_engine.types import ModelFacts, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint
    from typing import Any

    from rl_csrc.inference.images import ImageProcessor
    from rl_engine.base import Engine, LossFunction
    from rl_engine.types import EngineConfig, FolderTokens

_GROUP = "rl_engine.backends"
_ID = re.compile(r"(?:hf:)?(?P<name>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_WEIGHTS = "*.safetensors"
_LEFT_OUT = ("original/*", "onnx/*", "consolidated*")
"""The same weights again, in other formats."""
_IMAGE_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_BFLOAT16_FLAGS = frozenset(["avx512_bf16", "amx_bf16", "bf16"])
"""Flags in /proc/cpuinfo of processors that multiply bfloat16: Intel and AMD, AMX, ARM."""


def check(backend: str, config: EngineConfig, world_size: int = 1) -> dict[str, str]:
    """Refuse what the named backend could not run on `world_size` ranks; see `Engine.check`. Starts no process.

    Returns:
        By key, what settings that are left to the engine come to.

    Raises:
        BackendError: no such backend, or a package that it or a setting needs is missing (with the pip line).
        ConfigError: a setting that cannot be meant, or that the backend, the model or the ranks do not allow.
        ModelFolderError: the model folder cannot be read, or the backend does not take its architecture.
    """
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; it is a number of ranks, 1 or more.")
    return create_engine(backend, config).check(world_size)


def create_engine(backend: str, config: EngineConfig) -> Engine:
    """Build the named backend's engine; nothing is loaded before `initialize`.

    An entry point names a module with a function `create(config) -> Engine`.

    Raises:
        BackendError: no such backend is installed, or its imports fail (with the pip line).
    """
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if backend not in found:
        names = ", ".join(sorted(found)) or "none"
        raise BackendError(f"No engine backend is named {backend!r}. Installed: {names}.")
    try:
        module = found[backend].load()
    except ImportError as error:
        raise BackendError(
            f"Engine backend {backend!r} cannot be imported: {error}. Run: {_pip_line(found[backend])}"
        ) from error
    return module.create(for_this_machine(config))


def create_worker(
    config: EngineConfig, backend: str = "fsdp", *, max_resident: int = 8, idle_folder: str | Path | None = None
) -> Any:
    """Build a worker, a `rl_engine.TrainingWorker`, whose model is loaded. Collective.

    With `config.optimizer` it trains the model itself, under the adapter name None. Without, the model is frozen, and
    any number of LoRA adapters are added, trained side by side in one batch, and removed.

    Args:
        config: Settings of the engine; its `lora` is None.
        backend: Its name; adapters need fsdp.
        max_resident: Adapters whose weights and optimizer state stay on the device; the ones idle for longest are in
            host memory.
        idle_folder: Idle adapters are on disk in this folder, which this rank alone uses, and not in host memory.

    Raises:
        BackendError: no such backend, or it cannot be imported.
        ConfigError, ModelFolderError: as `Engine.initialize`.
    """
    worker = import_module("rl_engine.training_worker").TrainingWorker
    return worker(config, backend, max_resident=max_resident, idle_folder=idle_folder)


def create_loss(name: str, settings: Mapping[str, float] | None = None) -> LossFunction:
    """Build a loss that Tinker's clients name: cross_entropy, importance_sampling, ppo, cispo or dro.

    Sums over tokens, divided by nothing. cross_entropy reads the column `weights`, the others `logprobs` (of the
    sampler) and `advantages`, and `weights` where rows have it.

    Args:
        name: Its name.
        settings: `clip_low_threshold` and `clip_high_threshold` (ppo 0.8 and 1.2, cispo 0 and 4), `beta` (dro, 0.05).

    Raises:
        ConfigError: no such loss or setting, or a number out of range.
    """
    return import_module("rl_engine.losses").token_loss(name, settings or {})


def _pip_line(entry: EntryPoint) -> str:
    """Pip command that installs the plug-in's distribution, with the extra of its name if there is one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extra = f"[{entry.name}]" if entry.name in (entry.dist.metadata.get_all("Provides-Extra") or []) else ""
    return f"pip install '{entry.dist.name}{extra}'"


def for_this_machine(config: EngineConfig) -> EngineConfig:
    """Fill in the settings of a configuration that are left to the machine."""
    precision, checkpointing = config.precision, config.activation_checkpointing
    if precision == Precision.AUTO:
        precision = auto_precision()[0]
    if checkpointing is None:
        checkpointing = not config.treats_parts and _has_gpu()
    return replace(config, precision=precision, activation_checkpointing=checkpointing)


def auto_precision() -> tuple[Precision, str]:
    """Number format for `precision=auto` on this machine, and the reason: bfloat16 that is emulated is slow."""
    import torch

    if _has_gpu():
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
        return (Precision.BFLOAT16, "the GPU multiplies it") if is_native else (Precision.FLOAT32, "an older GPU")
    if _processor_flags() & _BFLOAT16_FLAGS:
        return Precision.BFLOAT16, "this processor multiplies it"
    return Precision.FLOAT32, "this processor only emulates bfloat16"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@cache
def _processor_flags() -> frozenset[str]:
    """Features of the processor as Linux names them; none without /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def describe_model(folder: str | Path) -> ModelFacts:
    """Describe the model in a Hugging Face folder, by its configuration alone.

    Of a pipeline of diffusers (`model_index.json`, no `config.json`) only that it is one: its engine checks it.

    Raises:
        ModelFolderError: a file of the folder is not what it should be; names it.
    """
    if (Path(folder) / "model_index.json").is_file() and not (Path(folder) / "config.json").is_file():
        return ModelFacts(
            config={}, image_columns=(), why_blind="it is a pipeline", longrope_limit=None, is_pipeline=True
        )
    from rl_csrc.inference.audio import AUDIO, takes_audio
    from rl_csrc.inference.decoder import longrope_limit  # imports torch
    from rl_csrc.inference.folder_tokens import read_model_config
    from rl_csrc.inference.images import image_columns, why_blind
    from rl_csrc.inference.videos import video_columns

    try:
        values = read_model_config(folder)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error
    config = values | values.get("text_config", {})
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    columns = image_columns(values) + (AUDIO if takes_audio(values) else ())
    return ModelFacts(
        config=config,
        image_columns=columns + video_columns(values)
        if any((Path(folder) / name).is_file() for name in _IMAGE_PROCESSORS)
        else (),
        why_blind=f"it has no {_IMAGE_PROCESSORS[0]}" if columns else why_blind(values),
        longrope_limit=longrope_limit(rope, config.get("original_max_position_embeddings")),
    )


def image_processor(folder: str | Path) -> ImageProcessor:
    """Image processor of a Hugging Face folder whose model takes images.

    Raises:
        ImportError, OSError, ValueError: transformers cannot load it.
    """
    from rl_csrc.inference.images import ImageProcessor

    return ImageProcessor(folder)


def describe_tokens(folder: str | Path) -> FolderTokens:
    """Describe which tokens of a Hugging Face folder end a turn; its chat template is rendered for that.

    Raises:
        ModelFolderError: one of the folder's files cannot be read.
    """
    from rl_engine.checkpoint.hf_folder import folder_tokens  # imports torch

    return folder_tokens(folder)


def model_folder(path: str, *, key: str = "model.path", has_weights: bool = True) -> str:
    """Folder of a model: `path` if it exists, else the snapshot of the hub's model of that id.

    What is not in the hub's cache (`HF_HOME`) is downloaded, in a terminal with a progress bar. The cache has to be one
    that every machine of a run sees.

    Args:
        path: A folder, or an id such as `Qwen/Qwen3-0.6B`, `hf:Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`.
        key: Name of the setting, for messages.
        has_weights: Download the weights too, not the configuration and the tokenizer alone.

    Returns:
        The folder; `path` itself where it is no id, for the caller to complain about.

    Raises:
        ModelFolderError: the hub has no such model, does not answer, or huggingface_hub is not installed (pip line).
    """
    found = _ID.fullmatch(path)
    if found is None or Path(path).exists():
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ModelFolderError(
            f"{key}={path} is not a folder, and the hub's models need huggingface_hub: pip install huggingface_hub"
        ) from error
    try:
        return snapshot_download(
            found["name"],
            revision=found["revision"],
            allow_patterns=[*_SMALL, *([_WEIGHTS] if has_weights else [])],
            ignore_patterns=[*_LEFT_OUT],
        )
    except GatedRepoError as error:
        raise ModelFolderError(
            f"{key}={path} is a gated model: accept its terms on its page, and log in by `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelFolderError(
            f"{key}={path}: the hub's {found['name']} has no revision {found['revision']}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelFolderError(
            f"{key}={path} is not a folder here, and the hub has no model {found['name']} (or it is private: `hf auth "
            "login`); correct the name"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelFolderError(
            f"{key}={path} is not a folder here, and cannot be downloaded from the hub: {_one_line(error)}; give a "
            "folder, or fix the connection (HF_ENDPOINT names a mirror, HF_HOME the cache)"
        ) from error


def _one_line(error: BaseException) -> str:
    """The first line of an error's text, of its cause where it has one."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}".rstrip(": ")
