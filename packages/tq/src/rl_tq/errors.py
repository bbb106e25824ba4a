"""Errors of rl-tq, all under `TransferQueueError`.

TransferQueueError
├── StorageError (ValueError)             no such storage, or it cannot be imported here
├── AddressError (ValueError)             the URL is not understood
├── SchemaError (ValueError)              a column's dtype, kind or row count disagrees with what the partition holds
├── MissingDataError (LookupError)        rows or columns that were asked for are not there; lists them
├── StaleReferenceError (LookupError)     a BatchMeta refers to rows that were cleared since
├── LeaseLostError (RuntimeError)         an ack or nack of rows whose lease expired, was revoked or is another's
├── QueueFullError (BufferError)          a partition has no room, and the call does not wait for it
├── StaleVersionError (ValueError)        a group that the staleness policy has given up
├── PolicyError (ValueError)              a row that the chosen policy can never give, or cannot judge
├── WaitTimeoutError (TimeoutError)       nothing became ready before the deadline; says what is missing and who owes it
└── ServerLostError (ConnectionError)     the queue's server closed or died; names it
"""

from __future__ import annotations


class TransferQueueError(Exception):
    """Base of every error that rl-tq raises on purpose."""


class StorageError(TransferQueueError, ValueError):
    """A storage is unknown, or is known and cannot be imported."""


class AddressError(TransferQueueError, ValueError):
    """A URL is not understood."""


class SchemaError(TransferQueueError, ValueError):
    """A column disagrees with what its partition already holds."""


class MissingDataError(TransferQueueError, LookupError):
    """Rows or columns that were asked for are not there."""


class StaleReferenceError(TransferQueueError, LookupError):
    """A reference points at rows that were cleared since."""


class LeaseLostError(TransferQueueError, RuntimeError):
    """Rows are no longer leased to the client that acks them: another consumer may have them."""


class QueueFullError(TransferQueueError, BufferError):
    """A partition has no room for a put."""


class StaleVersionError(TransferQueueError, ValueError):
    """A group has tokens of older weights than the staleness policy of its partition takes."""


class PolicyError(TransferQueueError, ValueError):
    """A policy cannot give or judge a row."""


class WaitTimeoutError(TransferQueueError, TimeoutError):
    """Deadline of a wait that passed before anything was ready."""


class ServerLostError(TransferQueueError, ConnectionError):
    """The queue's server went away."""
