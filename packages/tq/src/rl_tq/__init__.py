"""A columnar sample store: the controller passes references, workers exchange the tensors."""

from importlib import import_module
from typing import TYPE_CHECKING

from rl_tq.base import Sampler, Storage, TransferQueue
from rl_tq.errors import (
    AddressError,
    LeaseLostError,
    MissingDataError,
    PolicyError,
    QueueFullError,
    SchemaError,
    ServerLostError,
    StaleReferenceError,
    StaleVersionError,
    StorageError,
    TransferQueueError,
    WaitTimeoutError,
)
from rl_tq.types import BatchMeta, Credit, PartitionOptions, PerGroup, RestoreReport, RowMeta

if TYPE_CHECKING:
    from rl_tq import policies
    from rl_tq.registry import connect, create_policy, serve

__all__ = [
    "AddressError",
    "BatchMeta",
    "Credit",
    "LeaseLostError",
    "MissingDataError",
    "PartitionOptions",
    "PerGroup",
    "PolicyError",
    "QueueFullError",
    "RestoreReport",
    "RowMeta",
    "Sampler",
    "SchemaError",
    "ServerLostError",
    "StaleReferenceError",
    "StaleVersionError",
    "Storage",
    "StorageError",
    "TransferQueue",
    "TransferQueueError",
    "WaitTimeoutError",
    "connect",
    "create_policy",
    "policies",
    "serve",
]


def __getattr__(name: str) -> object:
    """Names that importing `rl_tq.base` does not need."""
    if name == "policies":
        return import_module("rl_tq.policies")
    if name in ("connect", "create_policy", "serve"):
        return getattr(import_module("rl_tq.registry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
