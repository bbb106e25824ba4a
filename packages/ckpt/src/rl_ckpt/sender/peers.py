"""`Peers`: connections to the receivers of a session at the sender, and waits for all of them."""

from __future__ import annotations

import errno
import selectors
from typing import TYPE_CHECKING

from rl_ckpt.errors import PeerLostError, PeerTimeoutError, ProtocolError
from rl_ckpt.protocol.channel import Deadline
from rl_ckpt.protocol.messages import Abort, Hello, Proof, Session
from rl_ckpt.sender.membership import Attach, Membership, Peer
from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.transports.streams import StreamWriter
from rl_csrc.buffers.pipeline import Pipeline
from rl_csrc.ipc import Waker

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.errors import CkptError
    from rl_ckpt.protocol.channel import Canceller
    from rl_ckpt.protocol.messages import AbortReason, Encoded, Message
    from rl_ckpt.transports.base import SendTransport
    from rl_ckpt.transports.streams import ByteRun


class Peers:
    """Connections to the receivers of a session. A failure of one is stored in its `error` until a wait raises it.

    `slots` are uint8 [bucket_bytes] each.
    """

    def __init__(
        self,
        transport: SendTransport,
        session: Session,
        slots: Sequence[Tensor],
        canceller: Canceller,
        timeout_s: float,
        pid: int,
    ) -> None:
        self.transport, self.session, self.canceller, self.timeout_s = transport, session, canceller, timeout_s
        self.members = Membership(session, transport.memory, transport.token, pid)
        self._waker = Waker()
        """Woken by native threads: the pipeline's, and those of streams."""
        is_native = slots[0].device.type == "cpu"
        self.pipeline = Pipeline(
            list(slots) if is_native else [None] * len(slots), LEAF_BYTES, self._waker.writer_fileno()
        )
        """Packs buckets; for slots on a device it only assigns them."""
        self._selector = selectors.DefaultSelector()
        """Selector of all connections, kept between waits because they may be many."""
        for descriptor in (canceller, transport, self._waker):
            self._selector.register(descriptor.fileno(), selectors.EVENT_READ)

    @property
    def num_freed(self) -> Counter[int]:
        """Per bucket of the sync, the number of receivers that freed it."""
        return self.members.num_freed

    def pump(self, deadline: Deadline, wakers: Sequence[int] = ()) -> bool:
        """Wait for events of any receiver and handle them. False: the deadline passed.

        Wakers are further descriptors that end the wait when readable.
        """
        self._drop_unauthenticated()
        for waker in wakers:
            self._selector.register(waker, selectors.EVENT_READ)
        try:
            ready = self._selector.select(deadline.remaining_s())
        finally:
            for waker in wakers:
                self._selector.unregister(waker)
        self.canceller.check()
        for key, _ in ready:
            peer: Peer | None = key.data
            if key.fd == self.transport.fileno():
                self._accept()
            elif key.fd == self._waker.fileno():
                self._look_at_streams()
            elif peer is not None and not peer.is_gone:
                self._read(peer)
        return bool(ready)

    def poll(self) -> None:
        """Handle all pending events, without waiting."""
        while self.pump(Deadline(0)):
            pass

    def wait_for_count(self, num_peers: int) -> None:
        """Wait until `num_peers` receivers have connected and sent `Hello`; their proof may come with the first sync.

        Raises:
            PeerTimeoutError: there were fewer.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while late := self.members.missing(
            num_peers - sum(peer.hello is not None for peer in self.members.joining), num_peers, self.transport.address
        ):
            if not self.pump(deadline):
                raise PeerTimeoutError(f"{late} within {self.timeout_s:g} s")

    def wait_for_ready(self, num_peers: int) -> list[Peer]:
        """Wait until there are `num_peers` receivers and all of them request a sync; returns all receivers.

        Raises:
            PeerTimeoutError: there were fewer, or some did not call `receive_weights`; those are dropped.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while late := self.members.missing(num_peers, num_peers, self.transport.address) or self.members.idle():
            if not self.pump(deadline):
                for peer in [peer for peer in self.members.admitted if not self.members.is_ready(peer)]:
                    self.drop(peer)
                raise PeerTimeoutError(f"{late} within {self.timeout_s:g} s")
        return list(self.members.admitted)

    def out_of_date(self, committed_versions: set[tuple[int, int]]) -> list[Peer]:
        """Receivers that request a sync and hold none of these (version, digest) pairs."""
        self.poll()
        ready = [peer for peer in self.members.admitted if self.members.is_ready(peer)]
        return [peer for peer in ready if peer.committed not in committed_versions]

    def wait_for_all(self, peers: Sequence[Peer], is_done: Callable[[Peer], bool], doing: str) -> None:
        """Wait until a condition holds for each of `peers`. Raises as `wait_until` does."""
        self.wait_until(peers, lambda: all(map(is_done, peers)), lambda peer: not is_done(peer), doing)

    def wait_for_streams(self, peers: Sequence[Peer]) -> None:
        """Wait until the kernel has accepted all payload, so that tensors may change. Raises as `wait_until` does."""
        self.wait_for_all(peers, lambda peer: peer.writer.wake_when_empty(), "take the bytes of a tensor")

    def wait_until(
        self, peers: Sequence[Peer], is_done: Callable[[], bool], is_late: Callable[[Peer], bool], doing: str
    ) -> None:
        """Wait until a condition holds that depends on `peers`.

        Raises:
            CkptError: the failure of one of them.
            PeerTimeoutError: the deadline passed; names the late ones, which are dropped.
        """
        deadline = Deadline(self.timeout_s)
        while True:
            for peer in peers:
                if peer.error is not None:
                    raise peer.error
            if is_done():
                return
            if not self.pump(deadline):
                late = [peer for peer in peers if is_late(peer)]
                for peer in late:
                    self.drop(peer)
                names = ", ".join(peer.name for peer in late)
                raise PeerTimeoutError(f"{names} did not {doing} within {self.timeout_s:g} s")

    def wait_for_news(self, peers: Sequence[Peer], news: Waker, is_there: Callable[[], bool], missing: str) -> None:
        """Wait for a condition that another thread signals by a waker, and handle events of `peers` meanwhile.

        Raises:
            CkptError: the failure of one of the peers.
            PeerTimeoutError: the deadline passed; names what is `missing`.
        """
        deadline = Deadline(self.timeout_s)
        while True:
            for peer in peers:
                if peer.error is not None:
                    raise peer.error
            news.clear()
            if is_there():
                return
            if not self.pump(deadline, [news.fileno()]):
                raise PeerTimeoutError(f"{missing} did not come within {self.timeout_s:g} s")

    def send(self, peer: Peer, message: Message | Encoded, descriptors: Sequence[int] = ()) -> None:
        """Send a message to one receiver; a failure becomes its `error`."""
        if peer.error is not None:
            return
        sync = 0 if isinstance(message, Hello | Proof | Session) else peer.sync
        try:
            peer.channel.send(
                message, sync, canceller=self.canceller, deadline=Deadline(self.timeout_s), descriptors=descriptors
            )
        except PeerTimeoutError as error:
            self.drop(peer, error)
        except PeerLostError as error:
            if not peer.is_gone:
                self._read(peer)  # it may have sent the reason
            self.drop(peer, error)

    def put(self, peer: Peer, payloads: Sequence[tuple[int, Sequence[ByteRun]]]) -> None:
        """Queue the payload of buckets, `(sequence, runs)` each, on one receiver's streams."""
        if peer.error is None:
            peer.writer.put(payloads)

    def new_group(self, peers: Sequence[Peer]) -> None:
        """Create the transport's process group of these receivers, if it broadcasts."""
        messages = self.transport.new_group([(peer.ticket, peer.opened, peer.channel) for peer in peers])
        for peer, message in zip(peers, messages, strict=False):
            self.send(peer, message)

    def abort(self, peers: Sequence[Peer], reason: AbortReason, text: str) -> None:
        """Send `Abort` to all receivers that can still get it, without waiting."""
        for peer in peers:
            if peer.error is None and not peer.channel.try_send(Abort(reason, text), peer.sync):
                self.drop(peer)
            peer.writer.close()
            peer.sync = peer.mapped = 0  # it may not have mapped the source
        self.transport.leave_group()

    def dismiss(self, reason: AbortReason, text: str) -> None:
        """Notify receivers waiting for a sync that none begins, without blocking."""
        for peer in [peer for peer in self.members.admitted if peer.waiting]:
            if not peer.channel.try_send(Abort(reason, text), peer.waiting):
                self.drop(peer)
            peer.waiting = 0

    def drop(self, peer: Peer, error: CkptError | None = None) -> None:
        """Remove a receiver from the session; it may reconnect."""
        peer.error = peer.error or error or PeerLostError(f"{peer.name} was dropped from the session")
        peer.writer.close()
        if not peer.is_gone:
            peer.is_gone = True
            self._selector.unregister(peer.channel)
        peer.channel.close()
        self.members.remove(peer)

    def close(self) -> None:
        """Close every connection."""
        for peer in [*self.members.admitted, *self.members.joining]:
            self.drop(peer)
        self._selector.close()
        self.pipeline.close()
        self._waker.close()

    def _accept(self) -> None:
        while (channel := self.transport.accept()) is not None:
            peer = Peer(channel, StreamWriter(self._waker, self.pipeline), Deadline(self.timeout_s))
            self.members.joining.append(peer)
            self._selector.register(channel, selectors.EVENT_READ, peer)

    def _drop_unauthenticated(self) -> None:
        for peer in [peer for peer in self.members.joining if not peer.deadline.remaining_s()]:
            self.drop(peer)

    def _look_at_streams(self) -> None:
        self._waker.clear()
        for peer in list(self.members.admitted):
            if (cause := peer.writer.error()) is not None:
                self._read(peer)  # it may have sent the reason
                is_late = cause.errno == errno.ETIMEDOUT  # of TCP_USER_TIMEOUT, as long as the deadline of a wait
                loss = PeerTimeoutError if is_late else PeerLostError
                self.drop(peer, loss(f"{peer.name} takes no payload any more: {cause}"))

    def _read(self, peer: Peer) -> None:
        try:
            for sync, message in peer.channel.receive():
                for reply in self.members.handle(peer, sync, message):
                    self._reply(peer, reply)
        except ProtocolError as error:
            self.drop(peer, ProtocolError(f"{peer.name}: {error}"))
            return
        except BaseException:  # an interrupt may lose messages, whose replies it would wait for
            self.drop(peer)
            raise
        if peer.channel.is_closed:
            self.drop(peer, peer.channel.loss())

    def _reply(self, peer: Peer, reply: Message | Attach) -> None:
        if isinstance(reply, Attach):
            self._selector.unregister(peer.channel)
            peer.is_gone = True
            reply.owner.writer.attach(reply.stream.index, reply.stream.opened, peer.channel.detach())
        else:
            self.send(peer, reply, self.transport.descriptors() if isinstance(reply, Session) else ())
