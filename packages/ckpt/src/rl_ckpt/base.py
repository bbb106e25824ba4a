"""Public interface: `WeightSender` and `WeightReceiver`, the two ends of a weight-transfer session."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
    from typing import Self

    from torch import Tensor

    from rl_ckpt.types import Metadata, ReceiverState, Shard, SyncReport


class Hold:
    """Lease of tensors, which stay valid; see `WeightReceiver.hold`. A context manager that releases."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def release(self) -> None:
        """Release the tensors: their memory may be reused from the next step of the iterator on. Idempotent."""
        release, self._release = self._release, lambda: None
        release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class CheckpointEngine(ABC):
    """Either end of a weight-transfer session: the trainer's `WeightSender`, or a server's `WeightReceiver`.

    Both are opened by `rl_ckpt.connect(url, role=...)`. A session is set up once (`prepare`, `connect`) and serves many
    syncs; buffers are allocated and shared once per session.

    A sync is a transaction. The sender streams buckets, each with a digest that the receiver checks on arrival. When
    the consumer of every receiver has taken every tensor, the sender commits on all, or aborts on all.
    `receive_weights` ends normally only after the commit; anything else raises, and the receiver's `state` says if what
    the consumer holds is still the old version (`IDLE`, `COMMITTED`) or may be mixed (`POISONED`: refuse to serve until
    a later sync succeeds).

    Receivers may come before the sender exists, and join or leave between syncs. One that died, or was dropped because
    it did not answer, is back in the session as soon as it (or its successor) calls `receive_weights`.

    Called by: one thread or event loop per end. Not picklable, and not for forked children: pass the URL instead. Every
    wait has a deadline (`timeout_s` of the session) and its error names the peer. A context manager that closes, `with`
    and `async with`. A closed end raises `UsageError`.
    """

    address: str
    """URL that peers pass to `rl_ckpt.connect`."""

    @property
    @abstractmethod
    def version(self) -> int | None:
        """Version of the last committed sync, or of the one being received; None before any."""

    @property
    @abstractmethod
    def digest(self) -> int | None:
        """Tree digest of the last committed sync, as `rl_ckpt.tree_digest` computes it; None before any."""

    @property
    @abstractmethod
    def state(self) -> ReceiverState:
        """State of this end in the transaction. A sender is `IDLE` until its first commit, then `COMMITTED`."""

    @abstractmethod
    async def prepare(self) -> Metadata:
        """Allocate buffers and open the session. Idempotent."""

    @abstractmethod
    async def connect(self, num_peers: int = 1) -> None:
        """Wait until `num_peers` peers are in the session; a sender requires as many in every later sync.

        A receiver has one peer, the sender, and waits until that exists.

        Raises:
            PeerTimeoutError: fewer joined before the deadline; the message says how many.
            UsageError: the sender's backend does not know its receivers (`Capability.VOTES`).
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave the session and free its buffers. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self.close())


class WeightSender(CheckpointEngine):
    """Sending end of a session: the trainer's, one per session."""

    @abstractmethod
    async def send_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]] | None = None,
        *,
        version: int,
        num_peers: int | None = None,
    ) -> SyncReport:
        """Send every `(name, tensor)` to every connected receiver, verify, and commit.

        None sends the registered source (`register_source`), whose tensors must not change before this returns. The
        same holds for a mapping's `.items()`: a tensor found modified before its turn is an error (`TensorError`). In a
        registered source and the items of a dict, tied tensors are detected and sent once.

        Tensors may have any dtype, shape and strides, on CPU or a device, with unique names. A tensor of an iterator
        may be overwritten as soon as the next one is requested. `version` must be greater than the last committed one.
        `num_peers` waits for as many receivers, as `connect` does; in a collective export pass it here, where a failure
        still drains the source.

        A plain iterable is consumed in order by one thread other than the event loop's, and to its end even if the sync
        fails, so that the other ranks of a collective export are not left waiting (unless it raises itself, or the call
        is cancelled). `send` consumes it in the calling thread.

        Raises:
            SyncAbortedError: nothing was committed anywhere; the cause is chained.
        """

    @abstractmethod
    def register_source(self, named_tensors: Mapping[str, Tensor] | Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Register a source once for all `send_weights(version=...)`: tensors whose storages keep their addresses.

        Where the transport allows it, syncs need no export and no extra copy: tensors are packed in place (`shm`),
        written without waiting for each (`tcp`, `file`), or read in place by receivers (`cuda-ipc`).

        Args:
            named_tensors: Preferably the function `model.named_parameters`: it is called for every sync, so that a
                replaced storage (offload, `.data = ...`) is detected as an error. A mapping is checked likewise, but an
                earlier `state_dict()` does not see later changes of the model.

        Raises:
            TensorError: an item cannot be sent, or a name is repeated.
        """

    async def resend_current(self) -> SyncReport | None:
        """Send the committed version to receivers that wait and do not hold it; the others are not involved.

        A receiver that joined late, or was poisoned by a failed sync, need not wait for the next version. Call it
        between syncs at any time; it needs a copy of the weights (`connect(..., delta=True)`). Returns None if no
        receiver waits.

        Raises:
            UsageError: there is no copy, or it is incomplete after a failed sync.
            SyncAbortedError: the receivers did not take it; others are not affected.
        """
        return None

    async def dismiss(self, text: str) -> None:
        """Notify receivers waiting for a sync that none begins, and why: they raise `SyncAbortedError` at once.

        For a sync that failed before it began, or that a receiver comes late for: without it they wait to their
        deadline. Nothing where the backend does not know its receivers (`Capability.VOTES`).
        """

    def send(
        self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int, num_peers: int | None = None
    ) -> SyncReport:
        """Synchronous twin of `prepare`, `connect` and `send_weights`, for plain scripts."""

        async def run() -> SyncReport:
            await self.prepare()
            return await self.send_weights(weights, version=version, num_peers=num_peers)

        return asyncio.run(run())


class WeightReceiver(CheckpointEngine):
    """Receiving end of a session: one in every server, or one per rank of it."""

    @abstractmethod
    def receive_weights(self, *, clone: bool = False) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` as they arrive: CPU views that are valid until the iterator advances.

        `clone=True` yields tensors to keep. Ends normally only after the commit. Leaving the loop early aborts the sync
        for all receivers; to abort at once, iterate under `contextlib.aclosing`.

        Raises:
            DigestError, PeerLostError, PeerTimeoutError, ProtocolError, SyncAbortedError: the sync failed; see `state`.
        """

    async def receive_batches(self, *, clone: bool = False) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """Yield lists of `(name, tensor)` that arrived together, otherwise as `receive_weights`."""
        async for item in self.receive_weights(clone=clone):
            yield [item]

    def hold(self) -> Hold:
        """Keep the tensors that `receive_weights` or `receive_batches` yielded last, beyond the next step.

        They stay valid until `release()` or the end of the sync, whatever becomes of other holds, and their bucket is
        not reused meanwhile: at most all but one of the session's buckets (four unless the backend says otherwise) can
        be held.

        Raises:
            UsageError: there are no such tensors, or too many buckets are held.
        """
        return Hold(lambda: None)  # where yielded tensors are the consumer's own

    @abstractmethod
    async def receive_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Receive one sync into tensors of the caller, by name, and return its version.

        The fastest way if names, dtypes and shapes are those of the sender: bytes are written directly to the targets.
        Repeated calls with the same mapping can receive deltas (`connect(..., delta=True)`). Tensors are written before
        the commit, so after a failure they may be mixed, and `state` is then `POISONED`.

        Args:
            targets: Name to tensor, on any device; dtype and shape must equal those sent.
            strict: Whether every tensor of `targets` must be received.
            staged: Receive the version in host memory first, kept for the session, and install it once it is complete
                and verified. A failure leaves tensors and `state` as they were, except that `state` is `POISONED` after
                a vote without an outcome. Receives no deltas.

        Raises:
            TensorError: a received tensor is not in `targets` or differs from it, or one is missing (`strict`).
            CkptError: as `receive_weights`.
        """

    @abstractmethod
    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Attestation: have the receiver digest the engine's weights before each vote.

        `held` returns the engine's present tensors under the sender's names (views of fused tensors are fine). It is
        called once the consumer has taken every tensor; unless their digest equals that of what was sent, the sync is
        aborted everywhere, as it is if `held` raises. It may first install what was received, and may return None if it
        cannot tell: the vote is then not attested. `attest_with(None)` switches it off. Costs one read of the weights
        per sync.
        """

    def recv(self, *, clone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Synchronous twin of `prepare`, `connect` and `receive_weights`. The same lifetime rule holds for views."""
        with asyncio.Runner() as runner:

            async def first() -> AsyncIterator[tuple[str, Tensor]]:
                await self.prepare()
                await self.connect()
                return self.receive_weights(clone=clone)

            iterator = runner.run(first())
            while True:
                try:
                    item = runner.run(anext(iterator))  # pyright: ignore[reportArgumentType]
                except StopAsyncIteration:
                    return
                yield item

    def recv_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Synchronous twin of `prepare`, `connect` and `receive_into`."""

        async def run() -> int:
            await self.prepare()
            await self.connect()
            return await self.receive_into(targets, strict=strict, staged=staged)

        return asyncio.run(run())


class ShardSender(ABC):
    """Sending end of one rank of a trainer whose weights go from shard to shard; see `rl_ckpt.registry.create_sender`.

    Order of a sync: `stage` on every rank, `join_digest` on one of them, then `commit` on every rank, or `abort`.
    Nothing is committed anywhere before all ranks have staged. A failed `stage` is off for the sessions of its rank;
    the other ranks have to be aborted.

    Called by: one event loop. Not picklable. Every wait has a deadline, whose error names the peer.
    """

    @abstractmethod
    async def prepare(self) -> dict[int, str]:
        """Open the sessions. By rank of the server, the address that its receivers dial. Idempotent."""

    @abstractmethod
    async def stage(
        self,
        shards: Callable[[], Iterable[tuple[Shard, Tensor]]],
        *,
        version: int,
        num_replicas: int | Mapping[int, int] = 1,
    ) -> Mapping[str, object]:
        """Send this rank's slices, and wait until every receiver holds and verified all that it takes from all ranks.

        Args:
            shards: Gives this rank's shards, each of which is valid until the next one is asked for. It is called once
                for each session, in threads of their own.
            version: Greater than the last committed one.
            num_replicas: Receivers that each session waits for; or, by rank of the server, that one waits for. Those
                that a relay sends on to are its own.

        Returns:
            This rank's shares of the digest by tensor, for `join_digest`. Picklable: a number for every 4 MiB.
            `commit` or `abort` must follow.

        Raises:
            SyncAbortedError: it failed here or elsewhere, and is off for this rank's sessions.
        """

    @abstractmethod
    def join_digest(self, shares: Iterable[Mapping[str, object]]) -> int:
        """Tree digest of the whole model, of what `stage` returned on every rank.

        Raises:
            TensorError: slices of a tensor are missing, or were counted twice.
        """

    @abstractmethod
    async def commit(self, digest: int, version: int) -> SyncReport:
        """Commit the version that all ranks have staged; returns this rank's report, with the whole model's digest."""

    @abstractmethod
    async def abort(self, text: str) -> None:
        """Abort a staged version, with a reason. No-op if nothing is staged."""

    @abstractmethod
    async def dismiss(self, text: str) -> None:
        """Notify receivers waiting for a sync that none begins, and why."""

    @abstractmethod
    async def close(self) -> None:
        """Leave all sessions. Idempotent."""
