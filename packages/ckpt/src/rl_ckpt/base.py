"""Interface of weight transfer: one sender, any number of receivers, one version at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from rl_ckpt.types import Metadata, ReceiverState, SyncReport


class Hold:
    """Lease of tensors, which stay valid; see `WeightReceiver.hold`. A context manager that releases."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def release(self) -> None:
        """Let their memory be used again, from the next step of the iterator on. Idempotent."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Version of the last committed sync, or of the one that `receive_weights` is taking; None before any."""

    @property
    @abstractmethod
    def digest(self) -> int | None:
        """Tree digest of the last committed sync, as `rl_ckpt.tree_digest` computes it; None before any."""

    @property
    @abstractmethod
    def state(self) -> ReceiverState:
        """Where this end stands in the transaction. A sender is `IDLE` until its first commit, `COMMITTED` after."""

    @abstractmethod
    async def prepare(self) -> Metadata:
        """Allocate buffers and open the session. Idempotent."""

    @abstractmethod
    async def connect(self, num_peers: int = 1) -> None:
        """Wait until `num_peers` peers are in the session; a sender requires as many in every later sync.

        A receiver has one peer, the sender, and waits until that exists.

        Raises:
            PeerTimeoutError: fewer came before the deadline; says how many did.
            UsageError: the sender's backend does not know its receivers (`Capability.VOTES`).
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave the session and free its buffers. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

        None sends what `register_source` was given; those tensors must not change before this returns. Nor must those
        of a mapping's `.items()`: what is seen to be written to before its turn is an error (`TensorError`). Of a
        registered source and the items of a dict it is known which names are one memory; that is sent once.

        Tensors may be of any dtype, shape and strides, on CPU or a device, under names that differ. A tensor may be
        overwritten as soon as the next one is asked for. `version` must be greater than the last committed one.
        `num_peers` waits for so many receivers, as `connect` does; in a collective export say it here, where a failure
        still drains the source.

        A plain iterable is drained in order by one thread that is not the event loop's, and to its end also when the
        sync fails, so that the other ranks of a collective export are not left waiting (except when it raises itself,
        or the call is cancelled). `send` drains it in the calling thread.

        Raises:
            SyncAbortedError: nothing was committed anywhere; the cause is chained.
        """

    @abstractmethod
    def register_source(self, named_tensors: Mapping[str, Tensor] | Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Declare once what `send_weights(version=...)` sends: tensors whose storages stay where they are.

        Nothing is exported or copied aside per sync where the transport allows it: they are packed from where they are
        (`shm`), written from there without waiting for each (`tcp`, `file`), or read there by receivers (`cuda-ipc`).

        Args:
            named_tensors: `model.named_parameters`, the function, is best: it is called for every sync, so that a
                storage that was replaced (an offload, `.data = ...`) is noticed and is an error. A mapping is looked
                into likewise, but a `state_dict()` made earlier does not know of what happened to the model since.

        Raises:
            TensorError: an item cannot be sent, or a name comes twice.
        """

    async def resend_current(self) -> SyncReport | None:
        """Send the committed version again, to receivers that wait and do not hold it; the others are not involved.

        A receiver that joined late, or was poisoned by a failed sync, need not wait for the next version. Call it
        between syncs, as often as you like; it needs a copy of the weights (`connect(..., delta=True)`). None: nobody
        waits.

        Raises:
            UsageError: there is no copy, or a sync failed since and it is not whole.
            SyncAbortedError: those receivers did not take it; the others have nothing to do with it.
        """
        return None

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
        """Yield `(name, tensor)` as they land: CPU views that are valid until the iterator advances.

        `clone=True` yields tensors to keep. Ends normally only after the commit. Leaving the loop early calls the sync
        off for everyone; where that must be known at once, iterate under `contextlib.aclosing`.

        Raises:
            DigestError, PeerLostError, PeerTimeoutError, ProtocolError, SyncAbortedError: the sync failed; see `state`.
        """

    async def receive_batches(self, *, clone: bool = False) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """Yield what lands as `receive_weights` does, as many `(name, tensor)` at a time as landed together."""
        async for item in self.receive_weights(clone=clone):
            yield [item]

    def hold(self) -> Hold:
        """Keep the tensors that `receive_weights` or `receive_batches` handed out last, beyond the next step.

        They stay valid until `release()` or the end of the sync, and their bucket is not used for others meanwhile: at
        most all but one of the session's buckets (four, where the backend says nothing else) can be held.

        Raises:
            UsageError: there are no such tensors, or too many buckets are held.
        """
        return Hold(lambda: None)  # where tensors are the consumer's own there is nothing to keep

    @abstractmethod
    async def receive_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Receive one sync into tensors of the caller, by name, and return its version.

        The fast way where names, dtypes and shapes are those of the sender: bytes land where they belong, without a
        view in between. Called again with the same mapping, it can take differences (`connect(..., delta=True)`).
        Tensors are written before the commit, so after a failure they may be mixed, and `state` is then `POISONED`.

        Args:
            targets: Name to tensor, on any device; dtype and shape must be those that are sent.
            strict: Whether every tensor of `targets` must come.
            staged: Land the version in host memory first, kept for the session, and install it when all of it is there
                and verified. What fails, also after that, leaves the tensors and `state` as they were; but `state` is
                `POISONED` where a vote was cast and no verdict was heard. Takes no differences.

        Raises:
            TensorError: a tensor came that is not in `targets` or differs from it, or one did not come (`strict`).
            CkptError: as `receive_weights`.
        """

    @abstractmethod
    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Have a receiver look into its engine before each vote, and attest what it finds.

        `held` returns what the engine holds now, under the names of the sender (views of fused tensors will do). It is
        called when the consumer has taken every tensor; the digest of what it returns must be that of what was sent, or
        the sync is called off everywhere; if it raises, as well. It may install what has landed first, and return None
        where it cannot look: the vote is then not attested. None ends it. Costs one read of the weights per sync.
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
