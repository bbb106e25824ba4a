"""A columnar sample store: the controller passes references, workers exchange the tensors."""

from rl_tq import policies
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
from rl_tq.registry import connect, serve
from rl_tq.types import BatchMeta, Credit, OnFull, PartitionOptions, PerGroup, RestoreReport, RowMeta

__all__ = [
    "AddressError",
    "BatchMeta",
    "Credit",
    "LeaseLostError",
    "MissingDataError",
    "OnFull",
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
    "policies",
    "serve",
]
