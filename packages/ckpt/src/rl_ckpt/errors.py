"""Errors of rl-ckpt, all under `CkptError`.

CkptError
├── BackendError (ValueError)             no such backend, or it cannot be imported here
├── AddressError (ValueError)             the URL or an option of `connect` is not understood, or the name is taken
├── UsageError (RuntimeError)             the call does not fit this end: wrong role, busy, closed
├── VersionError (ValueError)             the version is not above the last one
├── TensorError (ValueError)              the source yields what cannot be sent
├── PeerTimeoutError (TimeoutError)       a peer did not answer before the deadline; names it
├── PeerLostError (ConnectionError)       a peer closed or died in the middle of a sync; names it
├── ProtocolError (ValueError)            a peer sent what the wire format does not allow
├── DigestError (ValueError)              bytes arrived, and they are not the bytes that were sent
├── AttestationError (ValueError)         the engine of a receiver does not hold what was received
└── SyncAbortedError (RuntimeError)       the sync was called off; every receiver kept its old version or refuses
"""

from __future__ import annotations


class CkptError(Exception):
    """Base of every error that rl-ckpt raises on purpose."""


class BackendError(CkptError, ValueError):
    """A backend is unknown, or is known and cannot be imported."""


class AddressError(CkptError, ValueError):
    """A URL or an option is not understood, or another sender holds the name."""


class UsageError(CkptError, RuntimeError):
    """The call does not fit this end or its present state."""


class VersionError(CkptError, ValueError):
    """A version is not above the one committed last."""


class TensorError(CkptError, ValueError):
    """The source of weights yields something that cannot be sent."""


class PeerTimeoutError(CkptError, TimeoutError):
    """A peer did not answer before the deadline."""


class PeerLostError(CkptError, ConnectionError):
    """A peer went away in the middle of a sync."""


class ProtocolError(CkptError, ValueError):
    """A peer sent something the wire format does not allow."""


class DigestError(CkptError, ValueError):
    """Received bytes differ from what was sent."""


class AttestationError(CkptError, ValueError):
    """An engine does not hold the weights that its receiver got."""


class SyncAbortedError(CkptError, RuntimeError):
    """The sync was called off before it was committed."""
