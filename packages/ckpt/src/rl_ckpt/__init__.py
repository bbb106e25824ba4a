"""Weight transfer from a trainer to its inference servers, as versioned and verified transactions."""

from importlib import import_module
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
from rl_ckpt.registry import capabilities, connect
from rl_ckpt.resharding import Resharding
from rl_ckpt.types import (
    Address,
    Addresses,
    Metadata,
    Receipt,
    ReceiverState,
    Role,
    SessionConfig,
    ShardSpec,
    SyncReport,
)

if TYPE_CHECKING:
    from rl_ckpt.adapters.layout import read_layouts, write_layout_request
    from rl_ckpt.sharded import (
        DigestShare,
        ShardedReceiver,
        ShardedSender,
        ShardPlan,
        join_addresses,
        join_digest,
        merge_reports,
        relay_address,
    )
    from rl_ckpt.tensors.digest import tree_digest
    from rl_ckpt.traffic import Placement

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
    "join_addresses",
    "join_digest",
    "merge_reports",
    "read_layouts",
    "relay_address",
    "tree_digest",
    "write_layout_request",
]
_HOMES = {
    "Placement": "rl_ckpt.traffic",
    "read_layouts": "rl_ckpt.adapters.layout",
    "tree_digest": "rl_ckpt.tensors.digest",
    "write_layout_request": "rl_ckpt.adapters.layout",
} | dict.fromkeys(
    (
        "DigestShare",
        "ShardPlan",
        "ShardedReceiver",
        "ShardedSender",
        "join_addresses",
        "join_digest",
        "merge_reports",
        "relay_address",
    ),
    "rl_ckpt.sharded",
)
"""Lazily imported names, by module: they need torch, which importing this package does not."""


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
