"""One node of a chain or a tree of receivers: it takes a version, verifies it, and serves it on before it votes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from rl_ckpt._receiver import Receiver
from rl_ckpt._registry import connect
from rl_ckpt._sender import Sender
from rl_ckpt.errors import DigestError, UsageError
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from rl_ckpt._sender import Offer
    from rl_ckpt.types import SyncReport


class Relay:
    """A receiver that sends to others: the trainer sends a version once, however many take it.

    The transaction spans the whole tree: a relay votes when everything has landed with it and all of its receivers have
    voted, and decides for them as was decided for it. It sends what its tensors hold, read again, and checks that this
    has the digest of what landed. A version is passed on when it is whole, so each level adds the time of one sync; a
    sender waits for the votes of all levels below, so give it a `timeout_s` that is enough for them.

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
        self._receiver = connect(upstream, role="receive", timeout_s=timeout_s, token=token)
        self._sender = connect(downstream, role="send", timeout_s=timeout_s, token=token, bucket_bytes=bucket_bytes)
        self._held: Callable[[], Mapping[str, Tensor] | None] | None = None
        self._targets: Mapping[str, Tensor] = {}

    @property
    def address(self) -> str:
        """URL for those who receive from it; whole after `prepare`."""
        return self._sender.address

    @property
    def version(self) -> int | None:
        """Version that is in force here, or landing."""
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
        if not (isinstance(self._receiver, Receiver) and isinstance(self._sender, Sender)):
            raise UsageError(
                f"a relay needs votes from {self._receiver.address} and to {self._sender.address}; file:// has none"
            )
        await self._sender.prepare()
        await self._receiver.prepare()

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Look into the engine before this node votes. See `CheckpointEngine.attest_with`."""
        self._held = held

    async def receive_into(
        self, targets: Mapping[str, Tensor], *, num_peers: int = 1, strict: bool = True, staged: bool = False
    ) -> SyncReport:
        """Receive one sync into tensors of the caller, and pass it on to `num_peers` receivers or more; their report.

        See `CheckpointEngine.receive_into` for the other arguments and the errors. If it fails, it has failed for all
        below as well.
        """
        await self.prepare()
        receiver, sender = cast("Receiver", self._receiver), cast("Sender", self._sender)
        offers: list[Offer] = []

        def pass_on() -> Mapping[str, Tensor] | None:
            landing = receiver.landing
            weights = [(spec.name, targets[spec.name]) for spec in landing.digests]
            offers.append(sender.offer(weights, landing.version, num_peers=num_peers))
            if offers[0].digest != landing.digest:
                raise DigestError(
                    f"version {landing.version} landed with digest {landing.digest:#018x}, and the tensors that it "
                    f"landed in have {offers[0].digest:#018x}: something else writes to them"
                )
            return None if self._held is None else self._held()

        receiver.attest_with(pass_on)
        try:
            await receiver.receive_into(targets, strict=strict, staged=staged)
        except BaseException as error:
            for offer in offers:
                await asyncio.to_thread(offer.abort, f"its sender has not got the version itself: {error!r}")
            raise
        self._targets = targets
        return await asyncio.to_thread(offers[0].commit)

    async def serve_late(self) -> SyncReport | None:
        """Give the version in force to those below that wait and do not have it, from this node's tensors.

        Raises:
            UsageError: this node has none in force.
            SyncAbortedError: those receivers did not take it, or the tensors are not that version any more.
        """
        if self._receiver.state is not ReceiverState.COMMITTED:
            raise UsageError(f"{self.address} relays no version yet: its own state is {self._receiver.state}")
        sender = cast("Sender", self._sender)
        return await asyncio.to_thread(lambda: sender.serve_from(list(self._targets.items())))

    async def close(self) -> None:
        """Leave both sessions. Idempotent."""
        await self._receiver.close()
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
