"""Errors of rl-rollout.

RolloutError
├── BackendError (ValueError)               unknown backend, or one that cannot be imported here
├── ConfigError (ValueError)                setting that the backend cannot honour
├── RequestError (ValueError)               request that no retry will fix: too long a prompt, unknown sampling field
├── UnsupportedError (NotImplementedError)  feature that this kind of server lacks; says what to use instead
├── ModelFolderError (ValueError)           model folder that cannot be served
├── ServerStartError (RuntimeError)         server that died or did not answer while starting; has its last output
├── ServerLostError (ConnectionError)       server that was stopped or died; names it
├── OverloadedError (RuntimeError)          too many requests wait; ask again later
├── RequestTimeoutError (TimeoutError)      no answer before the deadline; names the server
├── GenerationError (RuntimeError)          the model failed on this request, e.g. logits that are not finite
└── WeightUpdateError (RuntimeError)        failed weight update; says whether the old version still serves
"""

from __future__ import annotations

from typing import Any


class RolloutError(Exception):
    """Base class of the errors of rl-rollout."""


class BackendError(RolloutError, ValueError):
    """Unknown backend, or one that cannot be imported here."""


class ConfigError(RolloutError, ValueError):
    """Setting that the backend cannot honour."""


class RequestError(RolloutError, ValueError):
    """Invalid request, which no retry will fix."""


class UnsupportedError(RolloutError, NotImplementedError):
    """Feature that this kind of server lacks."""


class ModelFolderError(RolloutError, ValueError):
    """Model folder that cannot be served."""


class ServerStartError(RolloutError, RuntimeError):
    """Server that did not start."""


class ServerLostError(RolloutError, ConnectionError):
    """Server that was stopped or died."""

    partial: Any = None
    """Partial output of the request, a `TokenOutput`, where it is known."""


class OverloadedError(RolloutError, RuntimeError):
    """Queue of waiting requests is full."""


class RequestTimeoutError(RolloutError, TimeoutError):
    """Deadline passed without an answer."""


class GenerationError(RolloutError, RuntimeError):
    """Failure of the model on one request; the server goes on."""


class WeightUpdateError(RolloutError, RuntimeError):
    """Weight update that was not installed."""
