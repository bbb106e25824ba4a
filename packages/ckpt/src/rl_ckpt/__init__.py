"""Weight transfer from a trainer to its inference servers, as versioned and verified transactions."""

from importlib import import_module
from typing import TYPE_CHECKING

from rl_ckpt.base import CheckpointEngine, ShardSender, WeightReceiver, WeightSender
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
from rl_ckpt.types import (
    Address,
    Addresses,
    Metadata,
    Placement,
    Receipt,
    ReceiverState,
    Role,
    SessionConfig,
    ShardSpec,
    SyncReport,
    join_addresses,
    merge_reports,
    relay_address,
)

if TYPE_CHECKING:
    from rl_ckpt.adapters.layout import read_layouts, write_layout_request
    from rl_ckpt.registry import create_sender
    from rl_ckpt.resharding import Resharding
    from rl_ckpt.session import capabilities, connect
    from rl_ckpt.sharded import ShardedReceiver, ShardedSender, ShardPlan
    from rl_ckpt.tensors.digest import tree_digest
    from rl_ckpt.tensors.digest_share import DigestShare, join_digest

__all__ = [
    "Address",
    "AddressError",
    "Addresses",
    "AttestationError",
    "BackendError",
    "CheckpointEngine",
    "CkptError",
    "DigestError",
    "DigestShare",
    "Metadata",
    "PeerLostError",
    "PeerTimeoutError",
    "Placement",
    "ProtocolError",
    "Receipt",
    "ReceiverState",
    "Resharding",
    "Role",
    "SessionConfig",
    "ShardPlan",
    "ShardSender",
    "ShardSpec",
    "ShardedReceiver",
    "ShardedSender",
    "SyncAbortedError",
    "SyncReport",
    "TensorError",
    "UsageError",
    "VersionError",
    "WeightReceiver",
    "WeightSender",
    "capabilities",
    "connect",
    "create_sender",
    "join_addresses",
    "join_digest",
    "merge_reports",
    "read_layouts",
    "relay_address",
    "tree_digest",
    "write_layout_request",
]
_HOMES = {
    "DigestShare": "tensors.digest_share",
    "Resharding": "resharding",
    "ShardPlan": "sharded",
    "ShardedReceiver": "sharded",
    "ShardedSender": "sharded",
    "capabilities": "session",
    "connect": "session",
    "create_sender": "registry",
    "join_digest": "tensors.digest_share",
    "read_layouts": "adapters.layout",
    "tree_digest": "tensors.digest",
    "write_layout_request": "adapters.layout",
}
"""Names that importing `rl_ckpt.base` does not need, by module."""


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"rl_ckpt.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
