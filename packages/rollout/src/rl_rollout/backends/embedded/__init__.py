"""Embedded backend: our own continuous-batching engine over any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import ConfigError, ModelFolderError
from rl_rollout.registry import check_options, check_quantization, check_unused
from rl_rollout.validation import TOOL_PARSERS, check_device, find_plugin, read_adapter_config, read_model_config

if TYPE_CHECKING:
    from rl_rollout.base import RolloutServer
    from rl_rollout.types import ServerConfig


def check_model_folder(model_path: str) -> None:
    """Check that the path is a Hugging Face model folder, before anything heavy is imported.

    Raises:
        ModelFolderError: there is no such folder, or no `config.json` in it.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelFolderError(f"model folder {model_path!r} does not exist; give a folder in the Hugging Face layout")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {model_path!r} has no config.json; is it a Hugging Face model folder?")
    read_model_config(model_path)


OPTIONS = {
    "block_size": "positions per block of the cache; 16",
    "chunk_tokens": "prompt tokens computed per step, so that a long prompt does not delay others; 512, on a GPU 4096",
    "num_speculative_tokens": "most tokens per pass drafted from earlier completions of the same prompt; none",
    "tool_parser": "how the model writes tool calls, for /v1/chat/completions: hermes, llama, ...",
    "adapters": "LoRA adapters that requests may ask for: name to folder in peft's format",
    "max_adapters": "adapters at once, those that weight updates add included; as many as `adapters` has",
    "default_adapter": "the adapter of requests that ask for none",
}


def check_embedded_options(options: Mapping[str, Any]) -> None:
    """Check the backend's options.

    Raises:
        ConfigError: an unknown option, or a value that it cannot have.
    """
    check_options(options, OPTIONS, "embedded")
    for name, value in options.items():
        if name == "adapters":
            if not isinstance(value, Mapping) or not all(n and "." not in n for n in value):
                raise ConfigError(f"option adapters={value!r} must map names (without dots) to folders")
            for adapter, folder in value.items():
                read_adapter_config(adapter, folder)
        elif name == "default_adapter":
            if value not in (names := list(options.get("adapters", ()))):
                raise ConfigError(f"option default_adapter={value!r} is none of the adapters: {names}")
        elif name == "tool_parser":
            find_plugin(TOOL_PARSERS, value, "tool parser")
        elif not isinstance(value, int) or value < 1:
            raise ConfigError(f"option {name}={value!r} must be a whole number, at least 1")
    if (most := options.get("max_adapters")) is not None and most < (num := len(options.get("adapters", ()))):
        raise ConfigError(f"option max_adapters={most} is less than the {num} adapters that are given")


def create_server(config: ServerConfig) -> RolloutServer:
    """Server whose engine runs in a thread of this process."""
    check_embedded_options(config.options)
    check_device(config.device)
    check_quantization(config, "embedded", ("int8",))
    check_unused(config, ("parallel",), "the embedded engine computes on one device; take backend vllm or sglang")
    check_model_folder(config.model_path)
    from rl_rollout.backends.embedded.embedded_server import EmbeddedServer  # imports transformers and aiohttp

    return EmbeddedServer(config)


def launch_server(config: ServerConfig) -> RolloutServer:
    """Client whose `start` launches `rl-serve --backend embedded` as a subprocess."""
    check_embedded_options(config.options)
    check_quantization(config, "embedded", ("int8",))
    check_unused(config, ("parallel",), "the embedded engine computes on one device; take backend vllm or sglang")
    check_model_folder(config.model_path)
    from rl_rollout.http.http_server import LaunchedServer

    return LaunchedServer("embedded", config)
