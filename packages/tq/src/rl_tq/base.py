"""Public interface: `TransferQueue`, a columnar sample store, and the `Storage` protocol behind its addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from rl_tq.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from tensordict import TensorDict

    from rl_tq.types import AdvanceReport, BatchMeta, Buffer, Credit, Policy, RestoreReport, RowMeta

Sampler = Callable[[Sequence["RowMeta"], int], Sequence[int] | None]
"""Function that chooses rows for a claim: takes the ready rows (oldest first) and `batch_size`; returns as many
positions, or None to wait for a change. Runs in the claiming process, possibly several times per claim."""


class TransferQueue(ABC):
    """A columnar store that moves samples between the processes that make and use them.

    The controller passes `BatchMeta` (ids and column names, no tensors); whoever needs the values calls `get`, and they
    travel from the process that put them. Rows live in named partitions. A row's columns may come from different
    processes at different times; a row is *ready* for a consumer when every column it asks for is there.

    A claim is a lease: `ack` consumes its rows; they return to the queue by `nack`, when the lease expires, and when
    the claiming client dies or closes.

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
        credit: Credit | Sequence[Credit] | None = None,
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
            credit: Credit from `admit`, whose reserved room the put uses; several where the rows are of several groups.
                In a partition with a staleness policy a group is finished by the put that spends its credit, with all
                of its rows; rows that come without one are never claimed by the policy.
            timeout_s: How long to wait for room; None: the session's deadline. Columns for rows that exist never wait.

        Returns:
            The reference of these rows and columns.

        Raises:
            SchemaError: row counts differ, or a column exists with another dtype, kind or row shape, or is already
                filled in one of the rows.
            StaleReferenceError, LeaseLostError: a row of the `BatchMeta` was cleared, or is no longer leased to it.
            StaleVersionError: the staleness policy has given up a group with such old tokens.
            QueueFullError: there is no room, and waiting is not allowed or can never succeed; or a credit has ended.
            WaitTimeoutError: there was no room before the deadline; the message says who holds it.
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
        `batch["column"].tolist()`. The caller owns the result: writing to it changes no other
        copy.

        Args:
            meta: Reference to the rows.
            columns: Names of the columns to fetch.
            out: Output buffer, uint8 [n], contiguous, on any device: values are written to it at multiples of 64 bytes,
                and the returned tensors are views of it. Reuse it, pinned or on the GPU; with a `rl_tq.types.Buffer`,
                tensor objects of the previous get are reused too.
            device: Device of the returned tensors; one transfer per column. Not together with `out`.

        Raises:
            MissingDataError: a row has no such column yet.
            StaleReferenceError: a row was cleared.
            ValueError: `out` is not such a tensor, or is too small; the message says how many bytes are needed.
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
            partition: Name of the partition; it may not exist yet.
            columns: Columns that a row must have to be ready; the reference names these.
            batch_size: Number of rows; of groups, where the partition's staleness policy chooses.
            task: Name of the consumer; consumers with the same name share the rows.
            sampler: A policy of `rl_tq.policies`, or a function that chooses; None: the partition's staleness policy,
                or else oldest first.
            timeout_s: How long to wait; None: the session's deadline.
            lease_s: Duration of the lease, seconds: rows not acked by then return to the queue; `extend` prolongs it.
                None: the lease lasts until this client closes or its process dies.

        Raises:
            WaitTimeoutError: too few rows became ready; the message says how many are, which columns are missing, and
                who holds the others.
            PolicyError: the policy can never give one of the rows; or the partition declares its tasks, without this.
        """

    @abstractmethod
    def ack(self, meta: BatchMeta, *, step: int = 0) -> None:
        """Consume claimed rows, all or none, at training step `step`. Any client may, not only the one that claimed.

        Once acked under a lease, acking again under the same lease does nothing.

        Raises:
            LeaseLostError: the lease of a row expired, was revoked or is another's: discard what was computed from it.
            ValueError: the reference was not claimed.
        """

    @abstractmethod
    def nack(self, meta: BatchMeta, *, reason: str = "it was not acknowledged") -> None:
        """Return claimed rows to the queue for another claim; counts as a failed attempt.

        After `PartitionOptions.max_attempts` a row becomes a dead letter instead.

        Raises:
            LeaseLostError, ValueError: as `ack`.
        """

    def extend(self, meta: BatchMeta, lease_s: float) -> None:
        """Prolong leases: they expire `lease_s` seconds from now. All rows of one claim share one lease.

        Raises:
            LeaseLostError, ValueError: as `ack`.
        """
        raise StorageError(f"{type(self).__name__} has no leases with a deadline")

    @abstractmethod
    def restore(self, partition: str, step: int, *, task: str | None = None) -> RestoreReport:
        """Undo the acks after training step `step` and revoke all leases, for a trainer that resumes.

        Those rows can be claimed again, oldest first; acks under a revoked lease are refused. `task` None: all tasks.
        """

    def dead_letters(self, partition: str, task: str) -> BatchMeta:
        """Dead letters of a task: rows returned too often, with the columns they share; tag `dead_letter` says why.

        They are kept until they are cleared, and never claimed by that task again.
        """
        raise StorageError(f"{type(self).__name__} keeps no dead letters")

    @abstractmethod
    def configure(self, partition: str, **options: Any) -> None:
        """Set a partition's `PartitionOptions` by name; others get their defaults. The partition need not exist yet.

        Raises:
            ValueError: unknown option, or a value that is not allowed.
        """

    @abstractmethod
    def advance(self, partition: str, weight_version: int) -> AdvanceReport:
        """Set the weight version of a partition, and clear the groups that its staleness policy gives up.

        Raises:
            ValueError: `weight_version` is below the present one; versions only grow.
        """

    @abstractmethod
    def admit(
        self,
        *,
        partition: str,
        num_rows: int,
        num_bytes: int = 0,
        group_id: int | str | None = None,
        timeout_s: float | None = None,
    ) -> Credit:
        """Admission control: reserve room for rows before they are generated; blocks until there is room.

        `put(..., credit=...)` uses the reservation; the rest is returned by `release`, or when this client leaves. In a
        partition with a staleness policy a credit is for a group, `group_id`, and there is room when the policy admits
        one more; any process may spend it.

        Raises:
            SchemaError: `num_rows` is less than 1, or `group_id` has a credit already, or is missing.
            QueueFullError: the partition's limits are smaller.
            WaitTimeoutError: there was no room before the deadline; the message says who holds it.
        """

    @abstractmethod
    def release(self, credit: Credit) -> None:
        """Return the unused rest of a credit. Idempotent."""

    def explain(
        self, *, partition: str, columns: Sequence[str], batch_size: int, task: str, sampler: Policy | None = None
    ) -> str:
        """Reason why such a `get_meta` would wait: rows ready, leases and holders, missing columns and producers."""
        return f"fewer than {batch_size} rows of {partition!r} with {list(columns)} are ready for {task!r}"

    @abstractmethod
    def clear(self, meta_or_partition: BatchMeta | str) -> None:
        """Delete rows, or a whole partition. References to them raise `StaleReferenceError` from now on."""

    def snapshot(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """Snapshot: write a consistent state of the queue to a directory, for `serve(address, snapshot=path)`.

        Other calls go on while it writes, except while the bookkeeping is copied. It has rows, consumption, dead
        letters, options and weight versions; references to its rows stay valid. Leases with a deadline restart, others
        and credits are returned. An earlier snapshot in the directory is replaced once the new one is complete.

        Args:
            path: Directory on this host; on the server's host where it holds the values (`tcp`, `nixl`, `zmq`).
            timeout_s: How long to wait for that process; None: the session's deadline.

        Raises:
            AddressError: another process writes or serves in that directory.
            QueueFullError: the file system has no room.
        """
        raise StorageError(f"{type(self).__name__} writes no snapshots: a run on it has no checkpoints")

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Statistics, as plain values. A storage may add others.

        In total: `rows`, `bytes`, `extents` (puts of which a row is left), `leases`,
        `leases_expired`, `partitions`, and `waiters_elsewhere`, by the name of a partition that does not exist yet.

        Per partition: `generation`, `rows`, `bytes`, `columns` (to their kinds), `weight_version`,
        `dropped` (rows, by reason), `tasks` (to `leased`, `acked`, `dead` and `returns`), `options`, `waiters`,
        `promised_rows` and `promised_bytes`.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect; closing the client that `serve` returned also ends the queue and frees every row. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(Protocol):
    """Storage plug-in: the module or object that an entry point of the group `rl_tq.storage` names.

    The entry point's name is the scheme of its addresses. Both functions also take `token` if the storage needs one.
    Options after `?` in a served address are further parameters (str) of `serve`; `OPTIONS` maps each to one line of
    help. With `attach(host, name, *, timeout_s)` a storage can serve the queue of another (`serve(also=...)`): see
    `rl_tq.storage.tcp`.
    """

    def serve(self, name: str, *, timeout_s: float, snapshot: Path | None = None) -> TransferQueue:
        """Serve a queue from this process under `name` (a fresh one when empty) and return a client of it.

        `snapshot`: a directory that `TransferQueue.snapshot` wrote, as initial state; None: an empty queue.

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
