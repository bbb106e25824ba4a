"""The interface of the TransferQueue: rows addressed by sample id, columns that arrive whenever they are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from tensordict import TensorDict

    from rl_tq.types import BatchMeta, Buffer, Credit, Policy, RestoreReport, RowMeta

Sampler = Callable[[Sequence["RowMeta"], int], Sequence[int] | None]
"""Chooses rows for a claim: gets the ready rows (oldest first) and `batch_size`, and returns that many positions in
the list, or None to wait until something changes. Runs in the claiming process; may be called several times per
claim."""


class TransferQueue(ABC):
    """A columnar store that moves samples between the processes that make and use them.

    The controller passes `BatchMeta` (ids and column names, no tensors); whoever needs the values calls `get`, and they
    travel from the process that put them. Rows live in named partitions. A row's columns may come from different
    processes at different times; a row is *ready* for a consumer when every column it asks for is there.

    A claim is a lease: its rows are consumed once `ack` says so, and come back when the claiming client dies or closes,
    when the lease expires, or by `nack`.

    Client objects may be used from any thread, are not picklable (pass `address` instead), do not survive a fork, and
    never wait without a deadline. Any call raises `ServerLostError` once the process that served the queue closed it
    or died.
    """

    address: str
    """URL that other processes pass to `rl_tq.connect`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All URLs at which the queue is served, `address` first: the others are those of `serve(also=...)`."""
        return (self.address,)

    @abstractmethod
    def put(
        self,
        data: TensorDict | Mapping[str, Any],
        *,
        partition: str,
        sample_ids: Sequence[str] | BatchMeta | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        credit: Credit | None = None,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """Store one value per row for each column; all of it becomes visible at once, or none.

        Args:
            data: Column name to B rows: a tensor of shape (B, ...), a jagged nested tensor, a list of B tensors
                (ragged), of B lists of tensors (turns), of B `bytes`, or of B JSON-able Python values; or any of these
                as a `PerGroup` of one value per group. Neither pickled nor kept by reference.
            partition: Created on first use.
            sample_ids: B ids. Existing rows get new columns; None makes new rows with fresh ids. A `BatchMeta` names
                existing rows exactly: not others that were put under the same ids since, and, where it was claimed,
                only while its leases hold.
            tags: B small JSON-able mappings merged into the rows' tags; visible to the controller and to samplers.
            credit: Room that `admit` promised.
            timeout_s: How long to wait for room, where the partition's `on_full` is `block`; None: the session's
                deadline. Columns for rows that exist never wait.

        Returns:
            The reference of these rows and columns.

        Raises:
            SchemaError: row counts differ, or a column exists with another dtype, kind or row shape, or is already
                filled in one of the rows.
            StaleReferenceError, LeaseLostError: a row of the `BatchMeta` was cleared, or is no longer leased to it.
            StaleVersionError: the tag `weight_version_min` of a new row is too far behind.
            QueueFullError: there is no room, and waiting is not allowed or would be in vain.
            WaitTimeoutError: there was no room in time; says who holds it.
        """

    @abstractmethod
    def get(
        self,
        meta: BatchMeta,
        columns: Sequence[str] | None = None,
        *,
        out: torch.Tensor | Buffer | None = None,
        device: torch.device | str | None = None,
    ) -> TensorDict:
        """Fetch columns (all of `meta.columns` when None) of rows, in the order of `meta.sample_ids`.

        Ragged columns come as jagged nested tensors (those of equal row lengths share their offsets), turns as a
        `TensorDict` of jagged `values` and of the jagged `lengths` of the turns, bytes and JSON as `NonTensorStack`:
        `batch["column"].tolist()`. What is returned is the caller's: writing to it changes nobody
        else's.

        Args:
            meta: Which rows.
            columns: Which columns.
            out: uint8 [n], contiguous, on any device: the tensors' values are laid into it, at multiples of 64 bytes,
                and what is returned are views of it. Use it again and again, pinned or on the GPU; as a
                `rl_tq.types.Buffer`, tensors of the get before are used again, too.
            device: Where the tensors shall be; one transfer per column. Not with `out`.

        Raises:
            MissingDataError: a row has no such column yet.
            StaleReferenceError: a row was cleared.
            ValueError: `out` is no such tensor or is too small: says how many bytes it takes.
        """

    @abstractmethod
    def get_meta(
        self,
        *,
        partition: str,
        columns: Sequence[str],
        batch_size: int,
        task: str,
        sampler: Sampler | Policy | None = None,
        timeout_s: float | None = None,
        lease_s: float | None = None,
    ) -> BatchMeta:
        """Claim `batch_size` ready rows for `task`, blocking until there are that many.

        Each row is leased to one claim of a task at a time, and never again once it is acked.

        Args:
            partition: Where; it may not exist yet.
            columns: What a row must have to be ready; the reference has these.
            batch_size: Rows.
            task: Who consumes: consumers of one name share the rows.
            sampler: A policy of `rl_tq.policies`, or a function that chooses; None: oldest first.
            timeout_s: How long to wait; None: the session's deadline.
            lease_s: Seconds until rows that were not acked go back; `extend` gives more. None: until this client
                closes or its process dies.

        Raises:
            WaitTimeoutError: says how many rows are ready, which columns the others lack, and who has them.
            PolicyError: a row stands in the policy's way; the partition declared its tasks, and this is none.
        """

    @abstractmethod
    def ack(self, meta: BatchMeta, *, step: int = 0) -> None:
        """Consume claimed rows, all or none, at training step `step`. Any client may, whoever claimed.

        Once acked under a lease, acking again under the same lease does nothing.

        Raises:
            LeaseLostError: a row's lease expired, was revoked or is another's: what was computed must be dropped.
            ValueError: the reference was not claimed.
        """

    @abstractmethod
    def nack(self, meta: BatchMeta, *, reason: str = "it was not acknowledged") -> None:
        """Give claimed rows back, to be claimed by somebody else; the attempt is counted.

        After `PartitionOptions.max_attempts` a row becomes a dead letter instead.

        Raises:
            LeaseLostError, ValueError: as `ack`.
        """

    @abstractmethod
    def extend(self, meta: BatchMeta, lease_s: float) -> None:
        """Have the leases of claimed rows expire `lease_s` seconds from now. A lease is one claim's: all its rows'.

        Raises:
            LeaseLostError, ValueError: as `ack`.
        """

    @abstractmethod
    def restore(self, partition: str, step: int, *, task: str | None = None) -> RestoreReport:
        """Take back the acks after training step `step`, and all leases: for a trainer that resumes from a checkpoint.

        Those rows are given again, oldest first; who still holds one of the leases is fenced off. `task` None: of all
        tasks.
        """

    @abstractmethod
    def dead_letters(self, partition: str, task: str) -> BatchMeta:
        """Rows that came back to `task` too often, with the columns that all of them have; tag `dead_letter` says why.

        They are kept until they are cleared, and are never given to the task again.
        """

    @abstractmethod
    def configure(self, partition: str, **options: Any) -> None:
        """Set a partition's `PartitionOptions`, by name; those not named get their defaults. It need not exist yet.

        Raises:
            ValueError: there is no such option, or its value makes no sense.
        """

    @abstractmethod
    def advance(self, partition: str, weight_version: int) -> int:
        """Tell a partition that the policy has new weights; returns how many rows were too old and were cleared.

        Raises:
            ValueError: versions only grow.
        """

    @abstractmethod
    def admit(self, *, partition: str, num_rows: int, num_bytes: int = 0, timeout_s: float | None = None) -> Credit:
        """Be promised room for rows, before they are generated; blocks until there is some.

        `put(..., credit=...)` draws on it; what is not drawn goes back by `release`, or when this client goes.

        Raises:
            SchemaError: less than one row.
            QueueFullError: there will never be as much room, or the partition's `on_full` is `raise`.
            WaitTimeoutError: there was no room in time; says who holds it.
        """

    @abstractmethod
    def release(self, credit: Credit) -> None:
        """Give back what is left of a credit. Idempotent."""

    @abstractmethod
    def explain(
        self, *, partition: str, columns: Sequence[str], batch_size: int, task: str, sampler: Policy | None = None
    ) -> str:
        """Why such a `get_meta` would wait: rows ready, leased and to whom, columns missing and who put the rest."""

    @abstractmethod
    def clear(self, meta_or_partition: BatchMeta | str) -> None:
        """Free rows, or a whole partition. References to them raise `StaleReferenceError` from now on."""

    @abstractmethod
    def snapshot(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """Write the queue as it is at one moment to a directory, from which `serve(address, snapshot=path)` begins.

        Nobody waits while it writes, but for the copying of the bookkeeping. Rows, who consumed what, dead letters,
        options and weight versions are in it, and references to its rows stay good. Leases with a deadline get it anew;
        others, and credits, are given back. What was in the directory before is replaced once the new one is whole.

        Args:
            path: Of this host; where the values lie in the serving process (`tcp`, `nixl`, `zmq`), of its host.
            timeout_s: How long to wait for that process; None: the session's deadline.

        Raises:
            AddressError: somebody writes or serves there.
            QueueFullError: the file system has no room.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counts, as plain values. A storage may add others.

        Of all: `rows`, `bytes`, `extents` (puts of which a row is left), `leases`,
        `leases_expired`, `partitions`, and `waiters_elsewhere`, by the name of a partition that does not exist yet.

        Of each partition: `generation`, `rows`, `bytes`, `columns` (to their kinds), `weight_version`,
        `dropped` (rows, by reason), `tasks` (to `leased`, `acked`, `dead` and `returns`), `options`, `waiters`,
        `promised_rows` and `promised_bytes`.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the session; the client that `serve` returned also ends the queue and frees every row. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(Protocol):
    """What an entry point of the group `rl_tq.storage` names: a module or object with these two functions.

    The entry point's name is the scheme of the addresses that it serves. The two take `token` as well if the storage
    asks for one. What may stand behind `?` in an address that is served are further parameters (str) of `serve`, which
    `OPTIONS` lists, if there are any: name to one line about it. With `attach(host, name, *, timeout_s)` a storage can
    serve the queue of another (`serve(also=...)`): see `rl_tq.storage.tcp`.
    """

    def serve(self, name: str, *, timeout_s: float, snapshot: Path | None = None) -> TransferQueue:
        """Serve a queue from this process under `name` (a fresh one when empty) and return a client of it.

        `snapshot`: a directory that `TransferQueue.snapshot` wrote, to begin with; None: an empty queue.

        Raises:
            AddressError: the name is taken.
        """
        ...

    def connect(self, name: str, *, timeout_s: float) -> TransferQueue:
        """A client of the queue served under `name`.

        Raises:
            ServerLostError: nobody serves it.
        """
        ...
