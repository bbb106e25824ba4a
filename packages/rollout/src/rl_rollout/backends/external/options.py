"""What the backends that start the server of others read before anything starts."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import ConfigError, ModelFolderError
from rl_rollout.multimodal import load_preparer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_rollout.multimodal import ImagePreparer

IMAGE_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose prepared images are given to the servers of others."""
COMMON_OPTIONS = {
    "args": "further arguments of the server, a list or a line",
    "env": "environment variables of the server beside those of this process",
}
"""Those that all of them have."""
ADAPTER_OPTIONS = {"adapters": "name to folder of each LoRA adapter, in peft's format"}
"""Of those that serve adapters."""


def has_vision(model_config: Mapping[str, Any]) -> bool:
    """Whether a model of `read_model_config` looks at images, whoever may show it some."""
    return "vision_config" in model_config


def find_preparer(model_path: str, model_config: Mapping[str, Any]) -> ImagePreparer | None:
    """Who prepares images for the servers of others; None for models whose interface they are not known to share."""
    if model_config.get("model_type") not in IMAGE_MODELS:
        return None
    num_merged = int(model_config["vision_config"]["spatial_merge_size"]) ** 2
    return load_preparer(model_path, token_id=int(model_config["image_token_id"]), num_merged=num_merged)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a server is started with."""

    name: str
    folder: str
    """Absolute."""
    rank: int
    config: Mapping[str, Any]
    """peft's."""


def read_adapters(found: Any, model_name: str) -> dict[str, Adapter]:
    """Each of the option `adapters`, by name.

    Raises:
        ConfigError: it is no object of names and folders, or a name is the model's.
        ModelFolderError: a folder holds no LoRA adapter.
    """
    if not isinstance(found, dict) or not all(isinstance(folder, str) for folder in found.values()):
        raise ConfigError(f"option adapters={found!r} must be an object of names and folders")
    if model_name in found:
        raise ConfigError(f"option adapters: {model_name!r} is the name of the model; call the adapter something else")
    return {name: _read_adapter(name, folder) for name, folder in found.items()}


def _read_adapter(name: str, folder: str) -> Adapter:
    try:
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"adapter {name!r}: folder {folder!r} has no adapter_config.json that can be read ({error})"
        ) from error
    if config.get("peft_type") != "LORA":
        raise ModelFolderError(f"adapter {name!r} is of type {config.get('peft_type')!r}; LORA is served")
    return Adapter(name, str(Path(folder).resolve()), int(config["r"]), config)


def read_environment(found: Any) -> dict[str, str]:
    """Environment variables of the option `env`.

    Raises:
        ConfigError: it is no object.
    """
    if not isinstance(found, dict):
        raise ConfigError(f"option env={found!r} must be an object of names and values")
    return {str(name): str(value) for name, value in found.items()}


def words(found: Any, name: str) -> list[str]:
    """A list of strings, or a line of them.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(found, str):
        return shlex.split(found)
    if not isinstance(found, list | tuple) or (not found and name == "command"):
        raise ConfigError(f"option {name}={found!r} must be a list of words, or a line of them")
    return [str(word) for word in found]
