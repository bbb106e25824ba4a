"""Receivers that send to others: a node of a chain or a tree while a version lands, and any holder of one later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from rl_ckpt.errors import UsageError
from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.registry import connect
from rl_ckpt.relay.pipe import RelayPipe
from rl_ckpt.sender.sender import Sender
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine, WeightReceiver
    from rl_ckpt.sender.sender import PreparedVersion
    from rl_ckpt.types import SyncReport


class Holder:
    """Lets any receiver give the version that it holds to those who come late, also when the trainer is gone.

    Those connect to the holder's own session, and to the trainer's for the syncs that follow. What the engine holds is
    read for it, and must have the digest that the receiver was given the version with.

    Args:
        receiver: The receiving end, of any backend. It stays the caller's.
        url: Of the session for late receivers; any backend with a transaction.
        held: What the engine holds, under the names of the sender; as for `WeightReceiver.attest_with`.
        timeout_s: Longest wait for a peer, seconds.
        token: Of the session for late receivers, where its backend wants one.
        bucket_bytes: Of that session.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        url: str,
        held: Callable[[], Mapping[str, Tensor]],
        *,
        timeout_s: float = 60.0,
        token: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self._receiver = receiver
        self._held = held
        self._sender = connect(url, role="send", timeout_s=timeout_s, token=token, bucket_bytes=bucket_bytes)

    @property
    def address(self) -> str:
        """URL for those who receive from it; whole after `prepare`."""
        return self._sender.address

    async def prepare(self) -> None:
        """Open the session for those who receive from it. Idempotent.

        Raises:
            UsageError: it has no transaction.
        """
        _require_votes(self._sender)
        await self._sender.prepare()

    async def resend_current(self) -> SyncReport | None:
        """Give the committed version to those who wait for it and do not have it. None: nobody waits.

        Call it between syncs of the receiver, as often as you like.

        Raises:
            UsageError: the receiver has none committed.
            SyncAbortedError: those who waited did not take it, or what the engine holds is not that version, or is only
                a part of the model with it (`receive_into(strict=False)`).
        """
        await self.prepare()
        version, digest = self._receiver.version, self._receiver.digest
        if self._receiver.state is not ReceiverState.COMMITTED or version is None or digest is None:
            raise UsageError(
                f"{self.address} has no version to give: the state of its receiver is {self._receiver.state}"
            )
        sender, held = cast("Sender", self._sender), self._held()
        return await asyncio.to_thread(lambda: sender.resend_from(held.items(), version, digest))

    async def close(self) -> None:
        """Leave the session for those who receive from it. Idempotent."""
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Relay(Holder):
    """A receiver that sends to others: the trainer sends a version once, however many take it.

    The transaction spans the whole tree: a relay votes when everything has landed with it and all of its receivers have
    voted, and decides for them as was decided for it. It passes on what has been verified, bucket by bucket, so each
    level adds the time of a bucket; what it sends is read from its tensors again, and checked to have the digest of
    what landed. A sender waits for the votes of all levels below, so give it a `timeout_s` that is enough for them.
    `resend_current` gives the committed version, from this node's tensors.

    Args:
        upstream: URL of the session to receive from.
        downstream: URL of the session to send to; any backend with a transaction.
        timeout_s: Longest wait for a peer, seconds.
        token: Of both sessions, where their backends want one.
        bucket_bytes: Of the session to send to.
    """

    def __init__(
        self,
        upstream: str,
        downstream: str,
        *,
        timeout_s: float = 60.0,
        token: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        receiver = connect(upstream, role="receive", timeout_s=timeout_s, token=token)
        super().__init__(
            receiver, downstream, lambda: self._targets, timeout_s=timeout_s, token=token, bucket_bytes=bucket_bytes
        )
        self._targets: Mapping[str, Tensor] = {}

    @property
    def version(self) -> int | None:
        """Version that is committed here, or being received."""
        return self._receiver.version

    @property
    def state(self) -> ReceiverState:
        """Where this node stands, as a receiver."""
        return self._receiver.state

    async def prepare(self) -> None:
        """Open both sessions. Idempotent.

        Raises:
            UsageError: one of the two has no transaction.
        """
        _require_votes(self._receiver)
        await super().prepare()
        await self._receiver.prepare()

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Look into the engine before this node votes. See `WeightReceiver.attest_with`."""
        self._receiver.attest_with(held)

    async def receive_into(
        self, targets: Mapping[str, Tensor], *, num_peers: int = 1, strict: bool = True, staged: bool = False
    ) -> SyncReport:
        """Receive one sync into tensors of the caller, and pass it on to `num_peers` receivers or more; their report.

        See `WeightReceiver.receive_into` for the other arguments and the errors. If it fails, it has failed for all
        below as well.
        """
        await self.prepare()
        receiver, sender = cast("Receiver", self._receiver), cast("Sender", self._sender)
        unpacker = await receiver.begin(targets, staged=staged)
        pipe = RelayPipe(unpacker)
        preparing = asyncio.ensure_future(sender.prepare_version(unpacker.version, num_peers=num_peers, pipe=pipe))
        preparing.add_done_callback(pipe.set_result)
        try:
            await receiver.take(unpacker, strict=strict, pipe=pipe)
        except BaseException as error:
            await self._call_off(preparing, f"its sender has not got the version itself: {error!r}")
            raise
        finally:
            pipe.close()
        self._targets = targets
        return await asyncio.to_thread(preparing.result().commit)

    async def _call_off(self, preparing: asyncio.Future[PreparedVersion], text: str) -> None:
        preparing.cancel(text)
        await asyncio.wait([preparing])
        if not preparing.cancelled() and preparing.exception() is None:
            await asyncio.to_thread(preparing.result().abort, text)

    async def close(self) -> None:
        """Leave both sessions. Idempotent."""
        try:
            await self._receiver.close()
        finally:
            await super().close()


def _require_votes(end: CheckpointEngine) -> None:
    if not isinstance(end, Receiver | Sender):
        raise UsageError(f"a relay or a holder needs votes, and {end.address.partition(':')[0]}:// has none")
