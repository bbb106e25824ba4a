"""Relays: receivers that send on, as nodes of a chain or tree during a sync (`Relay`) or afterwards (`Holder`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from rl_ckpt.errors import UsageError
from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.registry import connect
from rl_ckpt.relay.pipe import Forwarding
from rl_ckpt.sender.sender import Sender
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine, WeightReceiver
    from rl_ckpt.types import SyncReport


class Holder:
    """Serves the version that a receiver holds to late receivers, even when the trainer is gone.

    Late receivers connect to the holder's own session, and to the trainer's for later syncs. The holder reads the
    engine's tensors, which must have the digest of the committed version.

    Args:
        receiver: Receiving end, of any backend; the caller closes it.
        url: URL of the session for late receivers; any backend with votes.
        held: Returns the engine's tensors under the sender's names; as for `WeightReceiver.attest_with`.
        timeout_s: Longest wait for a peer, seconds.
        token: Token of the session for late receivers, if its backend needs one.
        bucket_bytes: Bucket size of that session.
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
        """URL for receivers; complete after `prepare`."""
        return self._sender.address

    async def prepare(self) -> None:
        """Open the session for late receivers. Idempotent.

        Raises:
            UsageError: its backend has no votes.
        """
        _require_votes(self._sender)
        await self._sender.prepare()

    async def resend_current(self) -> SyncReport | None:
        """Send the committed version to receivers that wait and do not hold it. None: there are none.

        Call it between syncs of the receiver, as often as you like.

        Raises:
            UsageError: the receiver has none committed.
            SyncAbortedError: a receiver failed; or the engine does not hold that version, or holds more than was
                received (`receive_into(strict=False)`).
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
        """Close the session for late receivers. Idempotent."""
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Relay(Holder):
    """Receiver that sends on, in a chain or tree: the trainer sends a version once for any number of receivers.

    The transaction spans the whole tree: a relay votes once it has verified everything and all of its receivers have
    voted, and passes the outcome on. It forwards verified bytes bucket by bucket, so each level adds the time of one
    bucket; it sends from its own tensors, whose digest must equal the received one. A sender waits for the votes of all
    levels, so give it a `timeout_s` for them. `resend_current` sends the committed version from this node's tensors.

    Args:
        upstream: URL of the session to receive from.
        downstream: URL of the session to send to; any backend with votes.
        timeout_s: Longest wait for a peer, seconds.
        token: Token of both sessions, if their backends need one.
        bucket_bytes: Bucket size of the session to send to.
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
        """Version that is committed or being received here."""
        return self._receiver.version

    @property
    def state(self) -> ReceiverState:
        """State of this node as a receiver."""
        return self._receiver.state

    async def prepare(self) -> None:
        """Open both sessions. Idempotent.

        Raises:
            UsageError: the backend of one of them has no votes.
        """
        _require_votes(self._receiver)
        await super().prepare()
        await self._receiver.prepare()

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Set the function that reads the engine's weights before this node votes. See `WeightReceiver.attest_with`."""
        self._receiver.attest_with(held)

    async def receive_into(
        self, targets: Mapping[str, Tensor], *, num_peers: int = 1, strict: bool = True, staged: bool = False
    ) -> SyncReport:
        """Receive one sync into tensors of the caller and send it on to at least `num_peers` receivers; their report.

        See `WeightReceiver.receive_into` for the other arguments and the errors. A failure aborts it for all levels
        below.
        """
        await self.prepare()
        receiver, sender = cast("Receiver", self._receiver), cast("Sender", self._sender)
        unpacker = await receiver.begin(targets, staged=staged)
        forwarding = Forwarding(sender, unpacker, num_peers)
        try:
            await receiver.take(unpacker, strict=strict, pipe=forwarding.pipe)
        except BaseException as error:
            await forwarding.call_off(f"its sender has not got the version itself: {error!r}")
            raise
        finally:
            forwarding.close()
        self._targets = targets
        return await forwarding.commit()

    async def close(self) -> None:
        """Close both sessions. Idempotent."""
        try:
            await self._receiver.close()
        finally:
            await super().close()


def _require_votes(end: CheckpointEngine) -> None:
    if not isinstance(end, Receiver | Sender):
        raise UsageError(f"a relay or a holder needs votes, and {end.address.partition(':')[0]}:// has none")
