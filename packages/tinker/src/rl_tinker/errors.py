"""Errors of rl-tinker.

TinkerError
├── ConfigError (ValueError)             setting, or line of the keys file, that cannot be used
├── RequestError (ValueError)            request that no retry will fix; has the HTTP status of its answer
│   ├── NotAllowedError                  401: no key that the server knows
│   ├── NotFoundError (LookupError)      404: no such session, model or checkpoint of this tenant
│   ├── GoneError                        410: the session has ended, or the result is no longer there
│   ├── QuotaError                       429: the tenant has reached a quota; ask again later
│   └── UnsupportedError                 400: part of the API that this server does not have
├── JournalError (RuntimeError)          the journal cannot be written; nothing was acknowledged
├── RanksLostError (ConnectionError)     the training processes ended or did not answer in time
└── CommandError (RuntimeError)          the training processes rejected a request
"""

from __future__ import annotations


class TinkerError(Exception):
    """Base class of the errors of rl-tinker."""


class ConfigError(TinkerError, ValueError):
    """Setting, or line of the keys file, that cannot be used."""


class RequestError(TinkerError, ValueError):
    """Request that no retry will fix."""

    status = 400


class NotAllowedError(RequestError):
    """No API key that the server knows."""

    status = 401


class NotFoundError(RequestError, LookupError):
    """No such session, model, checkpoint or request of this tenant."""

    status = 404


class GoneError(RequestError):
    """Ended session, or result that is no longer there."""

    status = 410


class QuotaError(RequestError):
    """Quota of the tenant that is reached; the request may be sent again later."""

    status = 429


class UnsupportedError(RequestError):
    """Part of the API that this server does not have. No 501: the SDK sends a request again for hours after any 5xx."""


class JournalError(TinkerError, RuntimeError):
    """Journal that cannot be written; nothing was acknowledged."""


class RanksLostError(TinkerError, ConnectionError):
    """Training processes that ended, or did not answer in time."""


class CommandError(TinkerError, RuntimeError):
    """Request that the training processes rejected; their state is unchanged."""
