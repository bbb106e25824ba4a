"""Options of third-party backends: adapters, environment, further arguments, image preprocessing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_csrc.inference.images import GRIDS, image_columns
from rl_rollout.errors import ConfigError
from rl_rollout.multimodal import load_preparer
from rl_rollout.validation import read_adapter_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.multimodal import ImagePreparer
    from rl_rollout.types import ServerConfig

IMAGE_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose images are prepared here, for third-party servers."""
COMMON_OPTIONS = {
    "args": "further arguments of the server, a list or a line",
    "env": "environment variables of the server in addition to those of this process",
}
"""Options of all third-party backends."""
ADAPTER_OPTIONS = {
    "adapters": "name to folder of each LoRA adapter, in peft's format",
    "default_adapter": "the adapter of requests that ask for none",
}
"""Options of the backends that serve adapters."""
MTP_OPTIONS = {"num_mtp_tokens": "tokens per pass drafted by the model's layer for multi-token prediction; none"}
"""Options of the backends whose servers draft with the model's own layer."""


def read_mtp_tokens(config: ServerConfig, arguments: Sequence[str]) -> int:
    """Validate the option `num_mtp_tokens`: 0 where the server does not draft with the model's own layer.

    Raises:
        ConfigError: it is no number, or another setting does not go with it.
    """
    options = config.options
    if (found := options.get("num_mtp_tokens")) is None:
        return 0
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(
            f"option num_mtp_tokens={found!r} must be a number of tokens, 1 or more; leave it out for none"
        )
    for is_met, what in (
        (not any(word.startswith("--speculative") for word in arguments), "args have --speculative arguments"),
        (not options.keys() & {"adapters", "max_adapters"}, "the server has adapters"),
        (config.quantization == "none", f"quantization={config.quantization!r}"),
        (config.parallel.pp == 1, f"parallel pp={config.parallel.pp}"),
    ):
        if not is_met:
            raise ConfigError(f"option num_mtp_tokens={found} does not go with this: {what}; leave one of them out")
    return found


def has_vision(model_config: Mapping[str, Any]) -> bool:
    """Whether a model, by its `config.json`, takes images."""
    return "vision_config" in model_config


def find_preparer(model_path: str, model_config: Mapping[str, Any]) -> ImagePreparer | None:
    """Image preprocessor for third-party servers; None where the model's image interface is not supported."""
    if model_config.get("model_type") not in IMAGE_MODELS or GRIDS not in image_columns(model_config):
        return None
    return load_preparer(model_path)


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA adapter that a server is started with."""

    name: str
    folder: str
    """Absolute path of its folder."""
    rank: int
    config: Mapping[str, Any]
    """Contents of its `adapter_config.json`."""


def read_adapters(found: Any, model_name: str) -> dict[str, Adapter]:
    """Read the adapters of the option `adapters`, by name.

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
    config = read_adapter_config(name, folder)
    return Adapter(name, str(Path(folder).resolve()), int(config["r"]), config)


def read_default(found: Any, adapters: Mapping[str, Adapter]) -> str | None:
    """Validate the option `default_adapter`.

    Raises:
        ConfigError: it is none of the adapters.
    """
    if found is not None and found not in adapters:
        names = ", ".join(adapters) or "none"
        raise ConfigError(f"option default_adapter={found!r} is none of the adapters: {names}")
    return found


def read_environment(found: Any) -> dict[str, str]:
    """Validate the option `env`: environment variables of the subprocess.

    Raises:
        ConfigError: it is no object.
    """
    if not isinstance(found, dict):
        raise ConfigError(f"option env={found!r} must be an object of names and values")
    return {str(name): str(value) for name, value in found.items()}


def words(found: Any, name: str) -> list[str]:
    """Words of an option that is a list of strings, or one command line.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(found, str):
        return shlex.split(found)
    if not isinstance(found, list | tuple) or (not found and name == "command"):
        raise ConfigError(f"option {name}={found!r} must be a list of words, or a line of them")
    return [str(word) for word in found]


def check_arguments(arguments: Sequence[str], given: Mapping[str, str]) -> None:
    """Check that the option `args` has no argument that `ServerConfig.parallel` sets and could contradict.

    Args:
        arguments: Words of the option `args`.
        given: By argument, the field of `ServerParallel` that writes it.

    Raises:
        ConfigError: names the argument and the field.
    """
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in given:
            raise ConfigError(
                f"args have {word}, which the layout of the replica gives: leave it out, and set parallel "
                f"{given[flag]} (rollout.parallel={{{given[flag]}: N}} of rl-train, --parallel {given[flag]}=N of "
                "rl-serve), so that GPUs and receivers of weights are counted by it"
            )


def is_quantised(arguments: Sequence[str], model_config: Mapping[str, Any]) -> bool:
    """Whether the server holds weights in another format than they are sent in, so that they cannot be compared.

    By the arguments of vLLM and SGLang, or as the folder's own are.
    """
    flags = ("--quantization", "-q", "--torchao-config")
    asked = any(word.partition("=")[0].replace("_", "-") in flags for word in arguments)
    return asked or model_config.get("quantization_config") is not None
