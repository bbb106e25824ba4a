"""The interface of the TransferQueue: rows addressed by sample id, columns that arrive whenever they are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_tq.types import BatchMeta, RowMeta

Sampler = Callable[[Sequence["RowMeta"], int], Sequence[int] | None]
"""Chooses rows for a claim: gets the ready rows (oldest first) and `batch_size`, and returns that many positions in
the list, or None to wait until something changes. Runs in the claiming process; may be called several times per
claim."""


class TransferQueue(ABC):
    """A columnar store that moves samples between the processes that make and use them.

    The controller passes `BatchMeta` (ids and column names, no tensors); whoever needs the values calls `get`, and they
    travel from the process that put them. Rows live in named partitions. A row's columns may come from different
    processes at different times; a row is *ready* for a consumer when every column it asks for is there.

    Client objects may be used from any thread, are not picklable (pass `address` instead), do not survive a fork, and
    never wait without a deadline. Any call raises `ServerLostError` once the process that served the queue closed it
    or died.
    """

    address: str
    """URL that other processes pass to `rl_tq.connect`."""

    @abstractmethod
    def put(
        self,
        data: TensorDict | Mapping[str, Any],
        *,
        partition: str,
        sample_ids: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> BatchMeta:
        """Store one value per row for each column; all of it becomes visible at once, or none.

        Args:
            data: Column name to B rows: a tensor of shape (B, ...), a jagged nested tensor, a list of B tensors
                (ragged), or a list of B JSON-able Python values. Neither pickled nor kept by reference.
            partition: Created on first use.
            sample_ids: B ids. Existing rows get new columns; None makes new rows with fresh ids.
            tags: B small JSON-able mappings merged into the rows' tags; visible to the controller and to samplers.

        Returns:
            The reference of these rows and columns.

        Raises:
            SchemaError: row counts differ, or a column exists with another dtype, kind or row shape, or is already
                filled in one of the rows.
        """

    @abstractmethod
    def get(self, meta: BatchMeta, columns: Sequence[str] | None = None) -> TensorDict:
        """Fetch columns (all of `meta.columns` when None) of rows, in the order of `meta.sample_ids`.

        Ragged columns come as jagged nested tensors (those of equal row lengths share their offsets), JSON columns as
        `NonTensorStack`: `batch["column"].tolist()`. What is returned is the caller's: writing to it changes nobody
        else's.

        Raises:
            MissingDataError: a row has no such column yet.
            StaleReferenceError: a row was cleared.
        """

    @abstractmethod
    def get_meta(
        self,
        *,
        partition: str,
        columns: Sequence[str],
        batch_size: int,
        task: str,
        sampler: Sampler | None = None,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """Claim `batch_size` ready rows for `task`, blocking until there are that many.

        Each row is given to each task once. `timeout_s` None means the session's deadline.

        Raises:
            WaitTimeoutError: says how many rows are ready and which columns the others lack.
        """

    @abstractmethod
    def clear(self, meta_or_partition: BatchMeta | str) -> None:
        """Free rows, or a whole partition. References to them raise `StaleReferenceError` from now on."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Rows, bytes and waiters per partition."""

    @abstractmethod
    def close(self) -> None:
        """Leave the session; the client that `serve` returned also ends the queue and frees every row. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(Protocol):
    """What an entry point of the group `rl_tq.storage` names: a module or object with these two functions.

    The entry point's name is the scheme of the addresses that it serves.
    """

    def serve(self, name: str, *, timeout_s: float) -> TransferQueue:
        """Serve a queue from this process under `name` (a fresh one when empty) and return a client of it."""
        ...

    def connect(self, name: str, *, timeout_s: float) -> TransferQueue:
        """A client of the queue served under `name`."""
        ...
