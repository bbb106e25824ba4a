"""Model folders of the Hugging Face hub: found on this machine, or downloaded by huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from rl_engine.errors import ModelFolderError

_ID = re.compile(r"(?:hf:)?(?P<name>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_WEIGHTS = "*.safetensors"
_LEFT_OUT = ("original/*", "onnx/*", "consolidated*")
"""The same weights again, in other formats."""


def model_folder(path: str, *, key: str = "model.path", has_weights: bool = True) -> str:
    """Folder of a model: `path` where there is one, else the snapshot of the hub's model of that id.

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
            f"{key}={path} is no folder, and the hub's models need huggingface_hub: pip install huggingface_hub"
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
            f"{key}={path} is no folder here, and the hub has no model {found['name']} (or it is private: `hf auth "
            "login`); correct the name"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelFolderError(
            f"{key}={path} is no folder here, and cannot be downloaded from the hub: {_told(error)}; give a folder, or "
            "mend the connection (HF_ENDPOINT names a mirror, HF_HOME the cache)"
        ) from error


def _told(error: BaseException) -> str:
    """The first line of an error's text, of its cause where it has one."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}".rstrip(": ")
