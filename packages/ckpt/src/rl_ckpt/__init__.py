"""Weights from a trainer to its inference servers: versioned, verified, at the speed of the hardware."""

from typing import TYPE_CHECKING

from rl_ckpt.base import CheckpointEngine, WeightReceiver, WeightSender
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
from rl_ckpt.registry import connect
from rl_ckpt.resharding import Resharding
from rl_ckpt.types import Metadata, Receipt, ReceiverState, Role, SessionConfig, ShardSpec, SyncReport

if TYPE_CHECKING:
    from rl_ckpt.tensors.digest import tree_digest

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
    "WeightReceiver",
    "WeightSender",
    "connect",
    "tree_digest",
]


def __getattr__(name: str) -> object:
    if name == "tree_digest":  # it needs torch, which an import of this package does not
        from rl_ckpt.tensors.digest import tree_digest

        return tree_digest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
