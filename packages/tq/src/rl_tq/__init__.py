"""A columnar sample store: the controller passes references, workers exchange the tensors."""

from rl_tq._registry import connect, serve
from rl_tq.base import Sampler, Storage, TransferQueue
from rl_tq.errors import (
    AddressError,
    MissingDataError,
    SchemaError,
    ServerLostError,
    StaleReferenceError,
    StorageError,
    TransferQueueError,
    WaitTimeoutError,
)
from rl_tq.types import BatchMeta, RowMeta

__all__ = [
    "AddressError",
    "BatchMeta",
    "MissingDataError",
    "RowMeta",
    "Sampler",
    "SchemaError",
    "ServerLostError",
    "StaleReferenceError",
    "Storage",
    "StorageError",
    "TransferQueue",
    "TransferQueueError",
    "WaitTimeoutError",
    "connect",
    "serve",
]
