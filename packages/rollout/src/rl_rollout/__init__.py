"""Served generation that RL can trust: token ids in, token ids out, a weight version on every token."""

from rl_rollout.base import RolloutServer, WeightReceiver
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
from rl_rollout.http.body import read_body
from rl_rollout.multimodal import placeholder_repeats
from rl_rollout.process import ChildProcess
from rl_rollout.receiver import CkptReceiver
from rl_rollout.registry import connect_server, create_server, launch_server
from rl_rollout.router import Router
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
)

__all__ = [
    "BackendError",
    "Capabilities",
    "ChildProcess",
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
    "ServerLostError",
    "ServerParallel",
    "ServerStartError",
    "TokenChunk",
    "TokenOutput",
    "UnsupportedError",
    "WeightReceiver",
    "WeightUpdateError",
    "connect_server",
    "create_server",
    "launch_server",
    "placeholder_repeats",
    "read_body",
]
