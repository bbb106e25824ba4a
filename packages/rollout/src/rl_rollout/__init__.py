"""Served generation that RL can trust: token ids in, token ids out, a weight version on every token."""

from importlib import import_module
from typing import TYPE_CHECKING

from rl_rollout.base import RolloutServer, ServerGroup, Subprocess, WeightReceiver
from rl_rollout.errors import (
    BackendError,
    ConfigError,
    GenerationError,
    ModelFolderError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    RolloutError,
    ServerLostError,
    ServerStartError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_rollout.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    ServerAddress,
    ServerConfig,
    ServerParallel,
    TokenChunk,
    TokenOutput,
    placeholder_repeats,
)

if TYPE_CHECKING:
    from rl_rollout.receiver import CkptReceiver
    from rl_rollout.registry import (
        connect_server,
        create_process,
        create_receiver,
        create_router,
        create_server,
        launch_server,
    )
    from rl_rollout.router import Router

__all__ = [
    "BackendError",
    "Capabilities",
    "CkptReceiver",
    "ConfigError",
    "FinishReason",
    "GenerateRequest",
    "GenerationError",
    "ModelFolderError",
    "OverloadedError",
    "RequestError",
    "RequestTimeoutError",
    "RolloutError",
    "RolloutServer",
    "Router",
    "SamplingParams",
    "ServerAddress",
    "ServerConfig",
    "ServerGroup",
    "ServerLostError",
    "ServerParallel",
    "ServerStartError",
    "Subprocess",
    "TokenChunk",
    "TokenOutput",
    "UnsupportedError",
    "WeightReceiver",
    "WeightUpdateError",
    "connect_server",
    "create_process",
    "create_receiver",
    "create_router",
    "create_server",
    "launch_server",
    "placeholder_repeats",
]

_HOMES = {"CkptReceiver": "receiver", "Router": "router"} | dict.fromkeys(
    ("connect_server", "create_process", "create_receiver", "create_router", "create_server", "launch_server"),
    "registry",
)
"""Names that importing `rl_rollout.base` does not need, by module."""


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"rl_rollout.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
