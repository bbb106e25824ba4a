"""Errors of rl-rollout.

RolloutError
├── BackendError (ValueError)             no such backend, or it cannot be imported here
├── ConfigError (ValueError)              a setting that this backend cannot honour
├── RequestError (ValueError)             a request that no retry will fix: empty or too long prompt, unknown sampling
field
├── UnsupportedError (NotImplementedError)  what this kind of server cannot do; says what can
├── ModelFolderError (ValueError)         the model folder cannot be loaded as it is
├── ServerStartError (RuntimeError)       the server died or did not answer while starting; carries its last lines
├── ServerLostError (ConnectionError)     the server closed or died; names it
├── OverloadedError (RuntimeError)        too much waits already; ask again later
├── RequestTimeoutError (TimeoutError)    no answer before the deadline; names the server
├── GenerationError (RuntimeError)        the model itself failed on this request, e.g. logits that are not finite
└── WeightUpdateError (RuntimeError)      an update failed; says whether the old version still serves or the server
refuses
"""

from __future__ import annotations

from typing import Any


class RolloutError(Exception):
    """Base of every error that rl-rollout raises on purpose."""


class BackendError(RolloutError, ValueError):
    """A backend is unknown, or is known and cannot be imported."""


class ConfigError(RolloutError, ValueError):
    """A setting that the backend cannot honour."""


class RequestError(RolloutError, ValueError):
    """A request that no retry will fix."""


class UnsupportedError(RolloutError, NotImplementedError):
    """This kind of server cannot do what it was asked."""


class ModelFolderError(RolloutError, ValueError):
    """A model folder cannot be served as it is."""


class ServerStartError(RolloutError, RuntimeError):
    """A server did not come up."""


class ServerLostError(RolloutError, ConnectionError):
    """A server went away."""

    partial: Any = None
    """Partial output of the request, a `TokenOutput`, where it is known."""


class OverloadedError(RolloutError, RuntimeError):
    """Too many requests wait already."""


class RequestTimeoutError(RolloutError, TimeoutError):
    """A server did not answer before the deadline."""


class GenerationError(RolloutError, RuntimeError):
    """The model failed on a request; the server goes on."""


class WeightUpdateError(RolloutError, RuntimeError):
    """New weights were not installed."""
