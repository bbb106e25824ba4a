"""Weights from a trainer to its inference servers: versioned, verified, at the speed of the hardware."""

from rl_ckpt._attest import tree_digest
from rl_ckpt.registry import connect
from rl_ckpt.base import CheckpointEngine
from rl_ckpt.errors import (
    AddressError,
    AttestationError,
    BackendError,
    CkptError,
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    SyncAbortedError,
    TensorError,
    UsageError,
    VersionError,
)
from rl_ckpt.resharding import Resharding
from rl_ckpt.types import Metadata, Receipt, ReceiverState, Role, SessionConfig, ShardSpec, SyncReport

__all__ = [
    "AddressError",
    "AttestationError",
    "BackendError",
    "CheckpointEngine",
    "CkptError",
    "DigestError",
    "Metadata",
    "PeerLostError",
    "PeerTimeoutError",
    "ProtocolError",
    "Receipt",
    "ReceiverState",
    "Resharding",
    "Role",
    "SessionConfig",
    "ShardSpec",
    "SyncAbortedError",
    "SyncReport",
    "TensorError",
    "UsageError",
    "VersionError",
    "connect",
    "tree_digest",
]
